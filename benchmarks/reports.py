"""The cost of reported step times for the service: reports per second, and the cost by job size.

Rates: 16 connections of two processes report one step of 8 ranks at a time, in turns for 400
jobs, to ``bagua-autotune serve`` on SQLite and, where it is installed, on a PostgreSQL of its own
(without fsync); nothing is decided meanwhile.  Costs: one connection, at 8, 1,024 and 8,192 ranks,
of a trial that has few steps or many.  The clients share the machine, so the rates are lower
bounds; the service's own CPU time says what they could be.  Goals: 1,200 reports a second on
SQLite, 500 on PostgreSQL, and a cost that the history of the ranks does not raise.

    python benchmarks/reports.py --json reports.json
    python benchmarks/reports.py --seconds 4 --repeats 20
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles

import psutil

sys.path.append(str(Path(__file__).parents[1]))  # the tests' PostgreSQL

from harness import print_table, write_json
from load import Connection, results, working
from service import serving

from bagua_autotune.deciding.next_step import step_cost
from bagua_autotune.model.job import Job, JobSpec, Limits, Observation, Trial
from bagua_autotune.model.knobs import Configuration, LogInteger
from bagua_autotune.store import Store
from tests.autotune.store.postgresql import find_binaries, running_cluster

JOBS = 400
RANKS = 8
CONNECTIONS = 16
HISTORIES = (10, 300)
WORLD_SIZES = (8, 1024, 8192)
DEFAULT = {"bucket_bytes": 25 * 2**20}


@dataclass(frozen=True)
class Rate:
    """Of one process of the service; latencies, and its CPU time of a report, in milliseconds."""

    database: str
    reports_per_second: float
    cpu_ms: float
    median_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Cost:
    """Of one report of one step, with so many steps of the trial stored before."""

    ranks: int
    history: int
    median_ms: float
    p95_ms: float


def steps(first: int, count: int, ranks: int) -> list[Observation]:
    """Steps that take turns in being long: the job never seems warm, and no trial ends."""
    found = range(first, first + count)
    return [Observation(step, (1e-3 * (1 + step % 2),) * ranks, (5e-4,) * ranks) for step in found]


def body(step: int, ranks: int) -> bytes:
    (told,) = steps(step, 1, ranks)
    content = {"step": step, "seconds": told.values, "compute_seconds": told.compute}
    return json.dumps({"trial": 0, "steps": [content]}).encode()


def register(store: Store, job_id: str, ranks: int, warmup_seconds: float = 86_400) -> None:
    spec = JobSpec.model_validate(
        {
            "name": job_id,
            "world_size": ranks,
            "ranks_per_node": (ranks,),
            "tensors": tuple(
                {"name": f"t{i}", "elements": 250_000, "bytes": 10**6, "dtype": "f", "group": "g"}
                for i in range(100)
            ),
            "knobs": {"bucket_bytes": LogInteger(low=2**16, high=2**30)},
            "default_configuration": DEFAULT,
            "fingerprint": "benchmark",
            "limits": Limits(warmup_seconds=warmup_seconds),
        }
    )
    first = Trial(0, "search", Configuration(DEFAULT))
    store.create_job(job_id, spec, at=time.time(), first=first)


class Reporter:
    """One kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._connection = Connection(port)
        self.latencies_seconds: list[float] = []

    def report(self, job_id: str, content: bytes) -> None:
        started = time.perf_counter()
        self._connection.post(f"/api/v2/jobs/{job_id}/observations", content)
        self.latencies_seconds.append(time.perf_counter() - started)


def _report(port: int, seconds: float, job_ids: Sequence[str]) -> list[float]:
    """One step of each of the jobs after the other, until the time is over; the latencies."""
    reporter = Reporter(port)
    end, step = time.perf_counter() + seconds, 0
    while True:
        step += 1
        content = body(step, RANKS)
        for job_id in job_ids:
            if time.perf_counter() >= end:
                return reporter.latencies_seconds
            reporter.report(job_id, content)


def measure_rate(url: str, seconds: float) -> Rate:
    store = Store(url)
    job_ids = [f"job-{number:03}" for number in range(JOBS)]
    for job_id in job_ids:
        register(store, job_id, RANKS)
    store.close()
    shares = [job_ids[place::CONNECTIONS] for place in range(CONNECTIONS)]
    with serving(url) as client:
        process = psutil.Process(client.pid)
        before = process.cpu_times()
        with working(partial(_report, client.port, seconds), shares) as futures:
            latencies = [1e3 * latency for found in results(futures) for latency in found]
        after = process.cpu_times()
    cpu_seconds = after.user + after.system - before.user - before.system
    backend = url.partition(":")[0]
    count, high = len(latencies), quantiles(latencies, n=100)[98]
    return Rate(backend, count / seconds, 1e3 * cpu_seconds / count, median(latencies), high)


def weighed(told: Sequence[Observation], job: Job, trial: Trial) -> list[float]:
    """What the steps cost, as the service stores it."""
    return [step_cost(job, trial, each) for each in told]


def measure_costs(url: str, repeats: int) -> Iterator[Cost]:
    store = Store(url)
    for ranks in WORLD_SIZES:
        for history in HISTORIES:
            register(store, f"{ranks}-{history}", ranks)
            told = steps(0, history, ranks)
            weigh = partial(weighed, told)
            store.add_observations(f"{ranks}-{history}", 0, told, time.time(), weigh)
    with serving(url) as client:
        for ranks in WORLD_SIZES:
            for history in HISTORIES:
                reporter = Reporter(client.port)
                for step in range(history, history + repeats):
                    reporter.report(f"{ranks}-{history}", body(step, ranks))
                found = [1e3 * latency for latency in reporter.latencies_seconds[1:]]
                yield Cost(ranks, history, median(found), quantiles(found, n=20)[18])
    store.close()


@contextmanager
def databases() -> Iterator[list[str]]:
    """An empty SQLite file, and an empty PostgreSQL where one is installed; by psycopg, too, where
    that is."""
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"sqlite:///{folder}/autotune.db"]
        binaries = find_binaries()
        if binaries is None:
            yield urls
            return
        with running_cluster(binaries) as url:
            drivers = [driver for driver in ("pg8000", "psycopg") if find_spec(driver)]
            yield [*urls, *(url.replace("+pg8000", f"+{driver}") for driver in drivers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="duration of the measurement of each rate"
    )
    parser.add_argument(
        "--repeats", type=int, default=40, help="number of reports to measure each cost"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    with databases() as urls:
        rates = [measure_rate(url, options.seconds) for url in urls]
        costs = list(measure_costs(urls[0], options.repeats))
    head = ("database", "reports/s", "CPU ms", "median ms", "p99 ms")
    rows = [
        (
            r.database,
            f"{r.reports_per_second:.0f}",
            f"{r.cpu_ms:.2f}",
            f"{r.median_ms:.1f}",
            f"{r.p99_ms:.1f}",
        )
        for r in rates
    ]
    print_table(head, rows)
    head = ("ranks", "steps before", "median ms", "p95 ms")
    rows = [(str(c.ranks), str(c.history), f"{c.median_ms:.1f}", f"{c.p95_ms:.1f}") for c in costs]
    print_table(head, rows)
    if options.json:
        content = {"rates": [asdict(r) for r in rates], "costs": [asdict(c) for c in costs]}
        write_json(options.json, content)


if __name__ == "__main__":
    main()
