"""The whole of ``/metrics``: what the service counts, and the jobs of its store.

One process, one registry of its own: the client library's multi-process mode is not used, and
nothing is registered globally. Of several processes each tells the others its counts over a socket
of its own, as a scrape reaches any one of them. All that it counts has the label ``process``, its
number: so each series belongs to one process and begins at 0 with it, as those of a replica do, and
nothing is counted twice.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from flask import Flask, Response, g, request
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from bagua_autotune import __version__
from bagua_autotune.metrics import text
from bagua_autotune.metrics.jobs import Jobs, StepHistograms
from bagua_autotune.model import reasons
from bagua_autotune.model.job import Job, Observation, Result
from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import is_in_memory
from bagua_autotune.store.engine.postgresql import SIZE
from bagua_autotune.store.errors import NoAnswer
from bagua_autotune.tuning.background import TunerListener
from bagua_autotune.views.summary import Summaries

logger = logging.getLogger(__name__)

# Of another process that stands still: a scrape then goes without its counts.
PATIENCE_SECONDS = 1.0
CHUNK_BYTES = 2**16


class Counts(NamedTuple):
    """What one process counts, as text: of each of its families, and of the steps of each job."""

    families: Sequence[bytes]
    steps: Mapping[str, bytes]


class Siblings:
    """The processes of a service, as one of them sees them.

    Args:
        number: of this one.
        sockets: on which each of them tells its counts, see ``listeners``.
    """

    def __init__(self, number: int, sockets: Sequence[socket.socket]) -> None:
        self.number = number
        self._sockets = sockets

    def tell(self, counts: Callable[[], Counts]) -> None:
        """Begin to tell the others what this process counts, in a thread that ends with it."""
        threading.Thread(target=self._tell, args=[counts], daemon=True).start()

    def ask(self) -> list[Counts]:
        """What the others count; without those that do not answer."""
        found = []
        for number, listener in enumerate(self._sockets):
            if number != self.number:
                try:
                    found.append(_receive(listener))
                except OSError as error:
                    logger.warning("the metrics are without process %d: %s", number, error)
        return found

    def _tell(self, counts: Callable[[], Counts]) -> None:
        while True:
            asking, _ = self._sockets[self.number].accept()
            with asking, suppress(OSError):  # it waited too long
                asking.settimeout(PATIENCE_SECONDS)
                asking.sendall(_as_json(counts()))


def listeners(count: int) -> list[socket.socket]:
    """Sockets for so many processes, in no folder; only Linux has such."""
    found = []
    for _ in range(count):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen()
        found.append(listener)
    return found


def _receive(listener: socket.socket) -> Counts:
    parts = []
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE_SECONDS)
        asking.connect(listener.getsockname())
        while part := asking.recv(CHUNK_BYTES):
            parts.append(part)
    if not parts:
        raise ConnectionError("it ended")
    families, steps = json.loads(b"".join(parts))
    return Counts(
        [samples.encode() for samples in families],
        {job_id: samples.encode() for job_id, samples in steps.items()},
    )


def _as_json(counts: Counts) -> bytes:
    steps = {job_id: samples.decode() for job_id, samples in counts.steps.items()}
    return json.dumps([[samples.decode() for samples in counts.families], steps]).encode()


# Of jobs without a team that is in the file of teams: names of others must not become labels.
NOBODY = "none"
Kind = TypeVar("Kind", Info, Counter, Gauge, Histogram)
REQUEST_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
PROPOSAL_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
# Counters without labels.
COUNTS = {
    "failed_decisions": "Decisions that failed; each is tried again at the job's next report.",
    "superfluous_decisions": "Decisions that came too late: another replica or a failed trial had "
    "moved the job on.",
    "saved_rank_seconds": "Time of ranks that confirmed speed-ups saved, of all jobs, without what "
    "tuning cost.",
    "search_cost_rank_seconds": "Time of ranks that tunings which ended with a result lost against "
    "the default.",
    "refused_tokens": "Requests that were refused as they had no token, or a wrong one.",
}
# A label must not grow with what a database says.
STORE_ERRORS = ("busy", "unavailable", "statement", reasons.OTHER_CODE)


class ServiceMetrics:
    """The registry of one app.

    Args:
        label: of all samples; none if empty.
    """

    def __init__(self, label: bytes = b"") -> None:
        self._label = label
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

        def make(
            kind: type[Kind], name: str, what: str, labels: tuple[str, ...] = (), **options: Any
        ) -> Kind:
            return kind(f"bagua_autotune_{name}", what, labels, registry=registry, **options)

        make(Info, "build", "The service's version.").info({"version": __version__})
        self.counts = {name: make(Counter, name, what) for name, what in COUNTS.items()}
        self.proposal_seconds = make(
            Histogram,
            "proposal_seconds",
            "Time to decide what follows a trial.",
            buckets=PROPOSAL_BUCKETS,
        )
        self._requests = make(
            Counter, "requests", "Requests answered.", ("route", "method", "code")
        )
        self._request_seconds = make(
            Histogram,
            "request_seconds",
            "Time to answer a request.",
            ("route",),
            buckets=REQUEST_BUCKETS,
        )
        self._store_errors = make(
            Counter, "store_errors", "Failures of the database, by reason.", ("reason",)
        )
        self._connections = make(Gauge, "connections", "Connections that are open.")
        self._connections_limit = make(
            Gauge, "connections_limit", "Connections that may be open at a time."
        )
        for reason in STORE_ERRORS:
            self._store_errors.labels(reason)  # at 0 from the start, so that the first one shows

    def samples(self) -> list[bytes]:
        """Of each family as text."""
        families = text.pieces(self._registry.collect())
        return [text.labelled(samples, self._label) for samples in families]

    def exposition(self, others: Sequence[Sequence[bytes]]) -> bytes:
        """The families of this process, and of others the samples."""
        return text.join(text.headers(self._registry.collect()), [self.samples(), *others])

    def count_store_error(self, error: SQLAlchemyError) -> None:
        self._store_errors.labels(label_of(error)).inc()

    def watch_connections(self, count: Callable[[], int], limit: int) -> None:
        """Show how many connections are open, and how many may be."""
        self._connections.set_function(count)
        self._connections_limit.set(limit)

    def watch(self, app: Flask) -> None:
        """Count the app's requests."""

        @app.before_request
        def _start() -> None:
            g.started = time.perf_counter()

        @app.after_request
        def _count(response: Response) -> Response:
            # The rule, not the path: paths hold job ids and whatever clients make up.
            route = request.url_rule.rule if request.url_rule else "unmatched"
            method = request.method if request.url_rule else "any"
            self._requests.labels(route, method, str(response.status_code)).inc()
            if response.status_code == HTTPStatus.UNAUTHORIZED:
                self.counts["refused_tokens"].inc()
            self._request_seconds.labels(route).observe(time.perf_counter() - g.started)
            return response


# A second series for each counter, which Prometheus' text format has no use for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(TunerListener):
    """Listens to the tuner and answers scrapes.

    Args:
        siblings: the processes of this service; None: there is only this one.
        teams: the names of those whose jobs are counted.
    """

    def __init__(
        self,
        store: Store,
        summaries: Summaries,
        siblings: Siblings | None = None,
        teams: Sequence[str] = (),
    ) -> None:
        self._store, self._teams = store, teams
        label = b'process="%d"' % siblings.number if siblings else b""
        self.service = ServiceMetrics(label)
        self._steps = StepHistograms(label)
        self._jobs = Jobs(store, summaries, self._steps)
        self._siblings = siblings
        if siblings:
            siblings.tell(self._counts)

    def exposition(self) -> bytes:
        """Prometheus's text format; without the jobs while the store cannot be read."""
        others = self._siblings.ask() if self._siblings else []
        try:
            jobs = self._jobs.exposition([counts.steps for counts in others])
            jobs += text.generate(_database_families(self._store, self._teams))
        except SQLAlchemyError as error:
            jobs = b""
            self.service.count_store_error(error)
            logger.error("the metrics are without the jobs: the store failed: %s", error)
        return self.service.exposition([counts.families for counts in others]) + jobs

    def _counts(self) -> Counts:
        return Counts(self.service.samples(), self._steps.samples(self._steps.job_ids()))

    def on_observed(self, job: Job, observations: Sequence[Observation]) -> None:
        self._steps.observe(job, observations)

    def on_result(self, job: Job, result: Result) -> None:
        self.service.counts["search_cost_rank_seconds"].inc(result.cost_seconds * job.world_size)

    def on_saved(self, job: Job, seconds: float) -> None:
        self.service.counts["saved_rank_seconds"].inc(seconds * job.world_size)

    def on_decided(self, seconds: float) -> None:
        self.service.proposal_seconds.observe(seconds)

    def on_superfluous(self) -> None:
        self.service.counts["superfluous_decisions"].inc()

    def on_failed(self, error: Exception) -> None:
        self.service.counts["failed_decisions"].inc()
        if isinstance(error, SQLAlchemyError):
            self.service.count_store_error(error)


def label_of(error: SQLAlchemyError) -> str:
    """Why the store failed, one of STORE_ERRORS. Busy: waited too long for its turn; unavailable:
    no database; statement: our mistake."""
    if isinstance(error, PoolTimeout) or "database is locked" in str(error):
        return "busy"
    if isinstance(error, (OperationalError, InterfaceError, NoAnswer)):
        return "unavailable"
    return "statement" if isinstance(error, DBAPIError) else reasons.OTHER_CODE


def _database_families(store: Store, teams: Sequence[str]) -> list[Metric]:
    """The room that the database takes and has, and whose jobs run: always the same families in
    the same order. Raises SQLAlchemyError if the store failed."""
    size = GaugeMetricFamily(
        "bagua_autotune_database_bytes",
        "What the database takes on its disk; of SQLite with the files beside it.",
    )
    free = GaugeMetricFamily(
        "bagua_autotune_database_free_bytes",
        "Free room on the disk of a SQLite file; of a server it is not known.",
    )
    running = GaugeMetricFamily(
        "bagua_autotune_team_running",
        "Jobs that have not ended, by team; none: of no team.",
        labels=["team"],
    )
    if not store.database.is_sqlite:
        ((used,),) = store.database.read(SIZE)
        size.add_metric([], float(used))
    elif not is_in_memory(store.database.url):
        file = Path(str(store.database.url.database)).resolve()
        size.add_metric([], sum(_bytes(each) for each in file.parent.glob(f"{file.name}*")))
        with suppress(OSError):
            free.add_metric([], shutil.disk_usage(file.parent).free)
    counts = dict.fromkeys((NOBODY, *teams), 0)
    for name, count in store.jobs.count_running().items():
        counts[name if name and name in counts else NOBODY] += count
    for name, count in counts.items():
        running.add_metric([name], count)
    return [size, free, running]


def _bytes(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except OSError:  # it went just now
        return 0
