"""Many kept-alive connections at once, from a few processes, and the service that they load; and
how many reports that takes on each database, with one process or several.
"""

from __future__ import annotations

import http.client
import json
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import psutil

from bagua_autotune.model.job import JobSpec, Trial
from bagua_autotune.store import Store
from bagua_wire.configuration import Configuration
from tests.autotune.server import ServeProcess
from tests.autotune.store.postgresql import find_binaries, running_cluster

PROCESSES = 2
Share = TypeVar("Share")
Result = TypeVar("Result")
RANKS = 8
LOADING_SECONDS = 2.0
DEFAULT = {"bucket_bytes": 25 * 2**20}


class Connection:
    """To a service on this machine."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def get(self, path: str) -> bytes:
        return self._send("GET", path, None)

    def post(self, path: str, content: bytes) -> bytes:
        """The body of the answer.

        Raises:
            OSError, http.client.HTTPException: there was none.
            RuntimeError: its status is neither 200 nor 201.
        """
        return self._send("POST", path, content)

    def _send(self, method: str, path: str, content: bytes | None) -> bytes:
        self._http.request(method, path, content, {"Content-Type": "application/json"})
        # Else 40 ms for the second part of an answer that is sent in two.
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        response = self._http.getresponse()
        answer = response.read()
        if response.status not in (200, 201):
            raise RuntimeError(f"{method} {path} was answered {response.status}: {answer[:500]!r}")
        return answer


@contextmanager
def working(
    work: Callable[[Share], Result], shares: Sequence[Share]
) -> Iterator[list[Future[list[Result]]]]:
    """All the shares of the work at once, each in a thread, until the last one is done."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        yield [pool.submit(_in_threads, work, shares[i::PROCESSES]) for i in range(PROCESSES)]


def results(futures: Sequence[Future[list[Result]]]) -> list[Result]:
    return [result for future in futures for result in future.result()]


def _in_threads(work: Callable[[Share], Result], shares: Sequence[Share]) -> list[Result]:
    with ThreadPoolExecutor(max(1, len(shares))) as threads:
        return list(threads.map(work, shares))


@dataclass(frozen=True)
class Service:
    port: int
    pid: int


@contextmanager
def serving(url: str, *arguments: str, **environment: str) -> Iterator[Service]:
    """``bagua-autotune serve`` on this database until the block ends, with further arguments and
    variables."""
    shared = ("--database", url, "--log-level", "error", *arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        ServeProcess(Path(folder) / "service.db", *shared, **environment) as service,
    ):
        time.sleep(LOADING_SECONDS)  # it still loads the search
        yield Service(int(service.url.rpartition(":")[2]), service.process.pid)


def registration(job_id: str, warmup_seconds: float = 0.0) -> dict[str, Any]:
    """The body that registers a job of eight ranks and 100 tensors."""
    tensors = [
        {"name": f"t{i}", "elements": 250_000, "bytes": 10**6, "dtype": "f", "group": "g"}
        for i in range(100)
    ]
    return {
        "name": job_id,
        "world_size": RANKS,
        "ranks_per_node": [RANKS],
        "tensors": tensors,
        "knobs": {"bucket_bytes": {"type": "log_integer", "low": 2**16, "high": 2**30}},
        "default_configuration": DEFAULT,
        "fingerprint": "benchmark",
        "limits": {"warmup_seconds": warmup_seconds},
    }


def register(url: str, job_ids: list[str], warmup_seconds: float) -> None:
    """Store such jobs, as their clients would register them."""
    store = Store(url)
    for job_id in job_ids:
        spec = JobSpec.model_validate_json(json.dumps(registration(job_id, warmup_seconds)))
        first = Trial(0, "search", Configuration(DEFAULT))
        store.jobs.create(job_id, spec, at=time.time(), first=first)
    store.close()


JOBS = 400
CONNECTIONS = 16
WARMUP_SECONDS = 86_400
GOALS = {"sqlite": 1200.0, "postgresql": 500.0}
"""Reports a second."""


@dataclass(frozen=True)
class Rate:
    """Of one service; latencies, and its processes' CPU time of a report, in milliseconds."""

    database: str
    processes: int
    reports_per_second: float
    cpu_ms: float
    median_ms: float
    p99_ms: float

    @property
    def goal(self) -> float:
        return GOALS[self.database.partition("+")[0]]


def measure_rates(seconds: float, processes: Sequence[int]) -> list[Rate]:
    """On each database that there is, with each number of processes in turns; nothing is decided
    meanwhile."""
    with databases() as urls:
        return [measure_rate(url, seconds, count) for url in urls for count in processes]


def measure_rate(url: str, seconds: float, count: int = 1) -> Rate:
    """With so many processes, of jobs that have no steps yet."""
    job_ids = [uuid.uuid4().hex for _ in range(JOBS)]
    register(url, job_ids, WARMUP_SECONDS)
    shares = [job_ids[place::CONNECTIONS] for place in range(CONNECTIONS)]
    with serving(url, "--processes", str(count)) as service:
        before = _cpu_seconds(service.pid)
        with working(partial(_report, service.port, seconds), shares) as futures:
            latencies = [1e3 * latency for found in results(futures) for latency in found]
        cpu_ms = 1e3 * (_cpu_seconds(service.pid) - before) / len(latencies)
    rate, high = len(latencies) / seconds, quantiles(latencies, n=100)[98]
    return Rate(url.partition(":")[0], count, rate, cpu_ms, median(latencies), high)


def _cpu_seconds(pid: int) -> float:
    process = psutil.Process(pid)
    spent = [each.cpu_times() for each in [process, *process.children()]]
    return sum(each.user + each.system for each in spent)


def _report(port: int, seconds: float, job_ids: Sequence[str]) -> list[float]:
    """One step of each of the jobs after the other, until the time is over; the latencies."""
    connection, latencies = Connection(port), []
    end, step = time.perf_counter() + seconds, 0
    while True:
        step += 1
        content = report_content(step)
        for job_id in job_ids:
            if (began := time.perf_counter()) >= end:
                return latencies
            connection.post(f"/api/v2/jobs/{job_id}/observations", content)
            latencies.append(time.perf_counter() - began)


def report_content(step: int) -> bytes:
    """Steps take turns in being long: the job never seems warm, and no trial ends."""
    seconds, computing = [1e-3 * (1 + step % 2)] * RANKS, [5e-4] * RANKS
    told = {"step": step, "seconds": seconds, "compute_seconds": computing}
    return json.dumps({"trial": 0, "steps": [told]}).encode()


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
