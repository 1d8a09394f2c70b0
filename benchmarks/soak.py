"""A short soak test: a million observations of jobs that come and go; does the service stay small?

Jobs of 8 ranks register, report 16 steps at a time, and end, some of them without a word; every
eighth is tuned to its end. ``bagua-autotune serve`` deletes them after seconds in place of months
(``--keep-days`` and the like, in fractions); every two seconds it is scraped and its page is asked
for, which is timed, and it is looked at. The table has the highest of each tenth of the run.

Memory must be flat: in the last tenth at most 10 % above that of the second. The database must be
bounded by what is deleted: at most twice as large then, as its size follows the rate of reports.
Threads and open files: at most 20 and 50 % more. The exit status is 1 if something is not so.

    python benchmarks/soak.py --json soak.json
    python benchmarks/soak.py --observations 100000 --keep-seconds 10 --postgresql
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import requests
from sqlalchemy import create_engine

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_autotune.upkeep import DAY_SECONDS
from bagua_client.service.client import (
    JobState,
    JobUnknown,
    ServiceClient,
    ServiceUnavailable,
    StepTimes,
)
from benchmarks.support.harness import as_given, print_table, write_json
from tests.autotune.server import ServeProcess
from tests.autotune.store.postgresql import find_binaries, running_cluster
from tests.autotune.support import Ranks, registration

PROCESSES, JOBS_AT_ONCE = 2, 4  # jobs: of each process
RANKS = 8
REPORT_STEPS = 16  # most that the client lets pass between two reports
RESTLESS_REPORTS = 20, 40  # fewest and most before a job is warm
TUNED_EVERY = 8
SILENT_EVERY = 3
MODELS = 30  # jobs of one take over what the one before found
LIMITS = {"max_samples": 4, "warmup_seconds": 86_400}
SAMPLE_SECONDS = 2.0
WAIT_SECONDS = 0.2
TENTHS = 10
MOST_GROWTH = {"memory_bytes": 1.1, "threads": 1.2, "files": 1.5, "database_bytes": 2.0}
MIB = 1024**2
NOISE = 0.03


@dataclass(frozen=True)
class Sample:
    """Of the service at a moment; ``seconds`` since the begin, observations and jobs until then."""

    seconds: float
    observations: int
    jobs: int
    memory_bytes: int
    threads: int
    files: int
    database_bytes: int
    look_seconds: float  # for a scrape, the list of jobs and one of them


class Training:
    """One job's rank 0, as a service sees it.

    Args:
        number: of the job; decides what becomes of it.
        took: is told how many observations the service took.
    """

    def __init__(self, url: str, number: int, seed: int, took: Callable[[int], None]) -> None:
        self._service = ServiceClient(url, uuid.uuid4().hex)
        self._number = number
        self._took = took
        self._random = random.Random(f"{seed}/{number}")
        self._ranks = Ranks(number, NOISE, world_size=RANKS)

    def run(self) -> None:
        """From its registration to its end."""
        name = f"soak-{self._random.randrange(MODELS)}"
        ranks = {"world_size": RANKS, "ranks_per_node": [2] * (RANKS // 2)}
        description = registration(name=name, fingerprint=name, limits=LIMITS, **ranks)
        state = self._ask(lambda: self._service.register(description))
        for _ in range(self._random.randint(*RESTLESS_REPORTS)):
            state = self._report(0, state.configuration, is_restless=True)
        if self._number % TUNED_EVERY == 0:
            self._tune(state)
        if self._number % SILENT_EVERY:
            self._tell("ended", None)

    def _tune(self, state: JobState) -> None:
        seen: set[int] = set()
        while state.trial is not None or state.deciding:
            trial = state.trial
            if trial is None or (state.deciding and trial in seen):
                time.sleep(WAIT_SECONDS)
                state = self._ask(self._service.state)
                continue
            if trial not in seen:
                seen.add(trial)
                self._tell("switched", trial)
            state = self._report(trial, state.configuration)

    def _report(
        self, trial: int, configuration: Mapping[str, Any], is_restless: bool = False
    ) -> JobState:
        """Steps that are long and short in turns make the job seem not warm."""
        steps = []
        for number, times in self._ranks.run(configuration, REPORT_STEPS):
            seconds = [each * (1 + is_restless * (number % 2)) for each in times]
            steps.append(StepTimes(number, seconds, [0.8 * each for each in seconds]))
        state = self._ask(lambda: self._service.observe(trial, steps))
        self._took(len(steps))
        return state

    def _tell(self, kind: str, trial: int | None) -> None:
        self._ask(lambda: self._service.event(kind, trial, self._ranks.step, "", 0.1))

    def _ask(self, request: Callable[[], JobState]) -> JobState:
        while True:
            try:
                return request()
            except ServiceUnavailable:  # a busy machine
                time.sleep(WAIT_SECONDS)


def work(url: str, seed: int, first: int, observations: Any, jobs: Any, stopping: Any) -> None:
    """Run jobs, so many at once, one after the other; in a process of its own."""

    def took(steps: int) -> None:
        with observations.get_lock():
            observations.value += steps

    def run(place: int) -> None:
        for number in count(place, PROCESSES * JOBS_AT_ONCE):
            if stopping.is_set():
                return
            with suppress(JobUnknown):  # it waited for its turn for longer than jobs are kept
                Training(url, number, seed, took).run()
            with jobs.get_lock():
                jobs.value += 1

    threads = [threading.Thread(target=run, args=(first + i,)) for i in range(JOBS_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def soak(
    url: str, process: psutil.Process, size: Callable[[], int], most: int, seed: int
) -> list[Sample]:
    """Let jobs come and go until there were so many observations."""
    context = get_context("fork")
    observations, jobs, stopping = context.Value("q", 0), context.Value("q", 0), context.Event()
    workers = [
        context.Process(
            target=work, args=(url, seed, i * JOBS_AT_ONCE, observations, jobs, stopping)
        )
        for i in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    began, samples = time.monotonic(), []
    while not samples or samples[-1].observations < most:
        time.sleep(SAMPLE_SECONDS)
        look_seconds = _look(url)
        if not all(worker.is_alive() for worker in workers):
            raise RuntimeError("the jobs ended early; see above")
        with process.oneshot():
            sample = Sample(
                seconds=time.monotonic() - began,
                observations=observations.value,
                jobs=jobs.value,
                memory_bytes=process.memory_info().rss,
                threads=process.num_threads(),
                files=process.num_fds(),
                database_bytes=size(),
                look_seconds=look_seconds,
            )
        samples.append(sample)
    stopping.set()
    for worker in workers:
        worker.terminate()
        worker.join()
    return samples


def _look(url: str) -> float:
    """As Prometheus does, and who has the page open; the seconds that it takes."""
    began = time.monotonic()
    requests.get(f"{url}/metrics", timeout=60).raise_for_status()
    listed = requests.get(f"{url}/api/v2/jobs?limit=100", timeout=60).json()["jobs"]
    if listed:
        requests.get(f"{url}/api/v2/jobs/{listed[0]['id']}/overview", timeout=60)
    return time.monotonic() - began


def by_tenth(samples: Sequence[Sample], most: int) -> list[Sample]:
    """The highest of each tenth of the run."""
    tenths: list[list[Sample]] = [[] for _ in range(TENTHS)]
    for sample in samples:
        tenths[min(TENTHS - 1, sample.observations * TENTHS // most)].append(sample)
    return [
        Sample(**{name: max(vars(each)[name] for each in found) for name in vars(found[0])})
        for found in tenths
        if found
    ]


def growth(tenths: Sequence[Sample]) -> dict[str, float]:
    """The last tenth's over the second's."""
    second, last = vars(tenths[1]), vars(tenths[-1])
    return {name: last[name] / second[name] for name in MOST_GROWTH}


def show(tenths: Sequence[Sample]) -> bool:
    """Print them; whether all is flat."""
    rows = [
        (
            f"{each.observations:,}",
            str(each.jobs),
            f"{each.seconds:.0f}",
            f"{each.memory_bytes / MIB:.1f}",
            str(each.threads),
            str(each.files),
            f"{each.database_bytes / MIB:.1f}",
            f"{1e3 * each.look_seconds:.0f}",
        )
        for each in tenths
    ]
    head = ("observations", "jobs", "s", "memory MiB", "threads", "files", "database MiB")
    print_table((*head, "look ms"), rows)
    found = growth(tenths)
    for name, ratio in found.items():
        is_over = "" if ratio <= MOST_GROWTH[name] else ": TOO MUCH"
        print(f"{name}, last tenth over the second: {ratio:.2f} (at most {MOST_GROWTH[name]})"
              f"{is_over}")  # fmt: skip
    return all(ratio <= MOST_GROWTH[name] for name, ratio in found.items())


@contextmanager
def database(folder: Path, is_postgresql: bool) -> Iterator[tuple[list[str], Callable[[], int]]]:
    """Arguments of ``serve``, and what tells the size in bytes."""
    if not is_postgresql:
        yield [], lambda: sum(path.stat().st_size for path in folder.glob("soak.db*"))
        return
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL is not installed")
    with running_cluster(binaries) as url:
        engine = create_engine(url)

        def size() -> int:
            with engine.connect() as connection:
                query = "SELECT pg_database_size(current_database())"
                return int(connection.exec_driver_sql(query).scalar_one())

        yield ["--database", url], size
        engine.dispose()


def measure(most: int, keep_seconds: float, seed: int, is_postgresql: bool) -> list[Sample]:
    """A soak of a service of its own."""
    retention = {
        "--thin-days": keep_seconds / 2 / DAY_SECONDS,
        "--keep-days": keep_seconds / DAY_SECONDS,
        "--upkeep-minutes": keep_seconds / 10 / 60,
    }
    options = [text for name, value in retention.items() for text in (name, f"{value:.9f}")]
    options += ["--log-level", "error"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            database(folder, is_postgresql) as (arguments, size),
            ServeProcess(folder / "soak.db", *options, *arguments) as service,
        ):
            process = psutil.Process(service.process.pid)
            return soak(service.url, process, size, most, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--observations", type=int, default=1_000_000)
    parser.add_argument(
        "--keep-seconds", type=float, default=30.0, help="how long ended jobs are kept"
    )
    parser.add_argument(
        "--postgresql", action="store_true", help="use PostgreSQL in place of SQLite"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    samples = measure(options.observations, options.keep_seconds, options.seed, options.postgresql)
    tenths = by_tenth(samples, options.observations)
    is_flat = show(tenths)
    if options.json:
        content = {
            "options": as_given(options),
            "samples": [asdict(sample) for sample in samples],
            "growth": growth(tenths),
        }
        write_json(options.json, content)
    sys.exit(0 if is_flat else 1)


if __name__ == "__main__":
    main()
