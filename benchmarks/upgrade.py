"""Upgrades two replicas of an older release on one PostgreSQL, one after the other, under load.

Half of the load are jobs that are tuned by the client's own reporter, simulated as for replicas.py;
half are models of Bagua's protocol, of two ranks each, that report and ask at once. A proxy gives
each replica its turn, request by request. It leaves out the one that is about to be restarted, as a
load balancer does whose check fails. The first replica of this release upgrades the store while the
other, of the older one, goes on using it; then both serve for some seconds before that one follows.

What must hold: no answer is a 5xx, nothing that was acknowledged is lost, each job ends as it does
in replicas.py, the two ranks of a model are never told to run different buckets, and the store has
this release's schema. The exit status is 1 if something does not.

    git worktree add ../before COMMIT
    python benchmarks/upgrade.py --before ../before --jobs 10 --models 10
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, select

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are


from bagua_autotune.store.engine.tables import SCHEMA_VERSION, SchemaRow
from benchmarks.support.fault_injection import tunings
from benchmarks.support.fault_injection.books import Books, audit
from benchmarks.support.fault_injection.proxy import FaultyProxy
from benchmarks.support.fault_injection.tunings import Ended, Setting, show
from benchmarks.support.harness import write_json
from benchmarks.support.load import Connection
from benchmarks.testbed.job import free_port
from tests.autotune.server import ServeProcess
from tests.autotune.store.postgresql import find_binaries, running_cluster

HERE = Path(__file__).resolve().parents[1]
REPLICAS = 2
RANKS = 2
DRAIN_SECONDS = 1.0
BETWEEN_SECONDS = 5.0
"""Before the first restart, and while both releases serve."""
STEP_SECONDS = 0.02
"""Of a model's 100 iterations."""
PAUSE_SECONDS = 0.004  # of a simulated job's step, for each job and model
QUICK = {
    "WORLD_SIZE": str(RANKS),
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.1",
}
"""A model is told other buckets as often as it can be."""


@dataclass(frozen=True)
class Model:
    """Of Bagua's protocol: what its two ranks were told.

    Attributes:
        pairs: of a report and an ask, of a rank.
        changes: how often both were told other buckets than before.
        apart: how often the two were told different buckets.
        longest_seconds: until an answer.
    """

    pairs: int
    changes: int
    apart: int
    longest_seconds: float


@dataclass(frozen=True)
class Outcome:
    """Of an upgrade; ``schemas``: before and after, ``start_seconds``: of each new replica."""

    schemas: tuple[int, int]
    start_seconds: Sequence[float]
    ended: Sequence[Ended]
    books: Books
    models: Sequence[Model]
    statuses: dict[int, int]

    def show(self) -> bool:
        """Print it; whether all is right."""
        failed = sum(count for status, count in self.statuses.items() if status >= 500)
        apart = sum(each.apart for each in self.models)
        others = {
            "schema before": self.schemas[0],
            "schema after": self.schemas[1],
            "requests": sum(self.statuses.values()),
            "answered by a 5xx": failed,
            "pairs of Bagua's models": sum(each.pairs for each in self.models),
            "of which told other buckets": sum(each.changes for each in self.models),
            "of which two ranks apart": apart,
            "longest wait of a pair's request, ms": round(
                1e3 * max((each.longest_seconds for each in self.models), default=0.0)
            ),
        }
        is_right = show(self.ended, self.books, others)
        starts = ", ".join(f"{seconds:.1f}" for seconds in self.start_seconds)
        print(f"answers {self.statuses}; seconds until each new replica took requests: {starts}")
        return is_right and not failed and not apart and self.schemas[1] == SCHEMA_VERSION


def run_model(port: int, number: int, is_over: threading.Event) -> Model:
    """The two ranks of a model after the other, until it is over; each rank has a connection."""
    connections = [Connection(port) for _ in range(RANKS)]
    pairs = changes = apart = models = iteration = 0
    longest_seconds, told = 0.0, ["", ""]
    with ThreadPoolExecutor(RANKS) as ranks:

        def send(place: int, path: str, **content: object) -> dict[str, Any]:
            nonlocal longest_seconds
            body = json.dumps({"model_name": f"model-{number}-{models}", **content}).encode()
            began = time.monotonic()
            while not (answer := _posted(connections[place], f"/api/v1/{path}", body)):
                time.sleep(STEP_SECONDS)  # the proxy has counted it
            longest_seconds = max(longest_seconds, time.monotonic() - began)
            return dict(json.loads(answer))

        def step(rank: int) -> tuple[str, bool]:
            at: dict[str, Any] = {"rank": rank, "train_iter": iteration}
            if iteration:
                ran = json.loads(told[rank])
                send(rank, "report_metrics", **at, hyperparameters=ran, speed=speed_of(ran))
            answer = send(rank, "ask_hyperparameters", **at)
            is_last = bool(answer["is_autotune_completed"])
            return json.dumps(answer["recommended_hyperparameters"]), is_last

        while not is_over.is_set():
            tensors = [
                {"name": f"t{number}-{models}-{i}", "num_elements": 250_000, "dtype": "f32"}
                for i in range(50)
            ]
            send(0, "register_tensors", tensor_list=tensors, whether_to_bucket=True)
            is_completed, iteration = False, 0
            while not is_completed and not is_over.wait(STEP_SECONDS):
                before = told
                (first, is_completed), (second, _) = ranks.map(step, range(RANKS))
                told = [first, second]
                pairs += RANKS
                apart += first != second
                changes += bool(iteration) and first != before[0]
                iteration += 100
            models += 1
    return Model(pairs, changes, apart, longest_seconds)


def _posted(connection: Connection, path: str, body: bytes) -> bytes:
    """The answer; empty if it is an error."""
    with suppress(RuntimeError):
        return connection.post(path, body)
    return b""


def speed_of(ran: dict[str, Any]) -> float:
    """The fewer buckets the faster, a little."""
    return 10.0 + 1.0 / len(ran["buckets"])


class Rolling:
    """Context manager: two replicas behind a proxy, which can be restarted with this release."""

    def __init__(self, url: str, folder: Path, before: Path) -> None:
        self._url = url
        self._folder = folder
        self._before = before.resolve()
        self._ports = [free_port() for _ in range(REPLICAS)]
        self._serving = list(self._ports)  # the proxy asks those that stand in it
        self._replicas: list[ServeProcess] = []
        self.proxy = FaultyProxy(self._serving, seed=0, every=0)

    def __enter__(self) -> Rolling:
        self._replicas = [self._start(self._before, port) for port in self._ports]
        self.proxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.push(self.proxy)
            for replica in self._replicas:
                stack.push(replica)
                replica.stop()

    def restart(self, place: int) -> float:
        """Restart one with this release; the seconds until it takes requests."""
        port = self._ports[place]
        self._serving.remove(port)
        time.sleep(DRAIN_SECONDS)
        self._replicas[place].stop()
        self._replicas[place].__exit__(None, None, None)
        began = time.monotonic()
        self._replicas[place] = self._start(HERE, port)
        took = time.monotonic() - began
        self._serving.append(port)
        return took

    def _start(self, release: Path, port: int) -> ServeProcess:
        log = self._folder / f"{port}-{release.name}.db"
        options = ("--port", str(port), "--database", self._url)  # the last one given is taken
        environment = {**QUICK, "PYTHONPATH": str(release / "autotune")}
        return ServeProcess(log, *options, files=None, **environment).__enter__()


def upgrade(before: Path, jobs: int, models: int, between_seconds: float) -> Outcome:
    """Restart the replicas while so many jobs and models use them."""
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory() as folder, running_cluster(binaries) as url:
        with Rolling(url, Path(folder), before) as rolling, ThreadPoolExecutor(models) as pool:
            is_over, proxy = threading.Event(), rolling.proxy
            port, pause_seconds = int(proxy.url.rpartition(":")[2]), (jobs + models) * PAUSE_SECONDS
            settings = [Setting(n, 1, proxy.url, pause_seconds) for n in range(jobs)]
            tuned = tunings.run(settings, at_once=jobs)
            run = [pool.submit(run_model, port, n, is_over) for n in range(models)]
            schema, starts = _schema(url), []
            try:
                for place in range(REPLICAS):
                    time.sleep(between_seconds)
                    starts.append(rolling.restart(place))
                time.sleep(between_seconds)
                ended = list(tuned)
            finally:
                is_over.set()
            found = [each.result() for each in run]
        books = audit(url, proxy.acknowledged)
        schemas = schema, _schema(url)
        return Outcome(schemas, starts, ended, books, found, dict(proxy.statuses))


def _schema(url: str) -> int:
    """As it is stored; a store of this release's would change it."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return connection.scalar(select(SchemaRow.version)) or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="a checkout of that release")
    parser.add_argument("--jobs", type=int, default=10, help="jobs being tuned at once")
    parser.add_argument("--models", type=int, default=10, help="models of Bagua's protocol")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    outcome = upgrade(options.before, options.jobs, options.models, BETWEEN_SECONDS)
    is_right = outcome.show()
    if options.json:
        content = {"options": {k: str(v) for k, v in vars(options).items()}}
        write_json(options.json, {**content, "outcome": asdict(outcome)})
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
