"""How many reports a service takes on each database, with one process or several."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median, quantiles

import psutil

from benchmarks.support.rates.load import RANKS, Connection, register, results, serving, working
from tests.autotune.store.postgresql import find_binaries, running_cluster

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
