"""So many jobs that report on time, to replicas on one PostgreSQL of the benchmark's own."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from statistics import median, quantiles

import psutil
from sqlalchemy import make_url

from benchmarks.support.rates.load import RANKS, Connection, register, results, serving, working
from tests.autotune.store.postgresql import find_binaries, running_cluster

EVERY_SECONDS = 2.0
STEPS_OF_REPORT = 2
STEP_SECONDS = EVERY_SECONDS / STEPS_OF_REPORT
NOISE = 0.01
SETTLING_SECONDS = 2 * EVERY_SECONDS
"""Until all connections are there."""
MOST_P99_MS = 100.0
FULL = 0.9
"""Of a core, or of all: what takes so much bounds the rest."""


@dataclass(frozen=True)
class Job:
    """Reports from ``starts_at`` until ``ends_at``, on the monotonic clock; ``is_warming_up``: so
    long as it does, nothing is decided."""

    job_id: str
    port: int
    starts_at: float
    ends_at: float
    is_warming_up: bool


@dataclass(frozen=True)
class Reports:
    """Of one job: seconds from when each was due until it was answered; how many were not; and
    to how many new trials the answers led."""

    latencies_seconds: Sequence[float]
    errors: int
    trials: int


@dataclass(frozen=True)
class Load:
    """What jobs at once did to the service; processor time in cores."""

    jobs: int
    is_warming_up: bool
    reports_per_second: float  # that were due, and answered in the end
    median_ms: float
    p99_ms: float
    errors: int
    trials_per_second: float
    replica_cores: Sequence[float]
    database_cores: float
    other_cores: float

    @property
    def holds(self) -> bool:
        return self.p99_ms <= MOST_P99_MS and not self.errors

    @property
    def bound(self) -> str:
        """What bounds it, in words."""
        cores = psutil.cpu_count() or 1
        if sum(self.replica_cores) + self.database_cores + self.other_cores >= FULL * cores:
            return f"all {cores} cores of the machine, which the jobs' connections share"
        if max(self.replica_cores) >= FULL:
            return "a replica: Python runs on one core at a time"
        return "no core: waiting for PostgreSQL, or for Python's lock"


def measure(jobs: int, replicas: int, seconds: float, is_warming_up: bool) -> Load:
    """On an empty database.

    Raises:
        RuntimeError: PostgreSQL is not installed.
    """
    binaries = find_binaries()
    if binaries is None:
        raise RuntimeError("PostgreSQL is not installed")
    with ExitStack() as stack:
        url = stack.enter_context(running_cluster(binaries))
        job_ids = [f"job-{number:04}" for number in range(jobs)]
        register(url, job_ids, 86_400 if is_warming_up else 0)
        services = [stack.enter_context(serving(url)) for _ in range(replicas)]
        start = time.monotonic() + 1
        begin, end = start + SETTLING_SECONDS, start + SETTLING_SECONDS + seconds
        shares = [
            Job(
                job_id,
                services[number % replicas].port,
                start + EVERY_SECONDS * number / jobs,
                end,
                is_warming_up,
            )
            for number, job_id in enumerate(job_ids)
        ]
        with working(report_on_time, shares) as futures:
            time.sleep(max(0.0, begin - time.monotonic()))
            before = cpu_seconds([each.pid for each in services], url)
            time.sleep(max(0.0, end - time.monotonic()))
            after = cpu_seconds([each.pid for each in services], url)
            found = results(futures)
    *own, database, machine = (
        (last - first) / seconds for first, last in zip(before, after, strict=True)
    )
    latencies = [1e3 * s for s in chain.from_iterable(each.latencies_seconds for each in found)]
    return Load(
        jobs=jobs,
        is_warming_up=is_warming_up,
        reports_per_second=len(latencies) / seconds,
        median_ms=median(latencies),
        p99_ms=quantiles(latencies, n=100)[98],
        errors=sum(each.errors for each in found),
        trials_per_second=sum(each.trials for each in found) / (end - start),
        replica_cores=own,
        database_cores=database,
        other_cores=max(0.0, machine - sum(own) - database),
    )


def find_most(jobs: int, replicas: int, seconds: float, is_warming_up: bool) -> list[Load]:
    """Half as many jobs, until they hold; of all counts that were tried."""
    loads = [measure(jobs, replicas, seconds, is_warming_up)]
    while not loads[-1].holds and loads[-1].jobs > 1:
        loads.append(measure(loads[-1].jobs // 2, replicas, seconds, is_warming_up))
    return loads


def report_on_time(job: Job) -> Reports:
    """Whatever becomes of a report, the next one is due at its time."""
    connection, draw = Connection(job.port), random.Random(job.job_id)
    due, step, trial, errors, latencies = job.starts_at, 0, 0, 0, []
    while due < job.ends_at:
        time.sleep(max(0.0, due - time.monotonic()))
        content = _content(step, trial, job.is_warming_up, draw)
        step += STEPS_OF_REPORT
        try:
            answer = connection.post(f"/api/v2/jobs/{job.job_id}/observations", content)
        except (OSError, http.client.HTTPException, RuntimeError):
            errors += 1
            connection = Connection(job.port)
        else:
            if due >= job.starts_at + SETTLING_SECONDS:
                latencies.append(time.monotonic() - due)
            told = json.loads(answer)["trial"]
            trial = told["index"] if told else trial
        due += EVERY_SECONDS
    return Reports(latencies, errors, trial)


def _content(step: int, trial: int, is_warming_up: bool, draw: random.Random) -> bytes:
    """Of a job whose steps take turns in being long, nobody says that it is warm."""
    steps = []
    for number in range(step, step + STEPS_OF_REPORT):
        long = number // STEPS_OF_REPORT % 2 if is_warming_up else 0
        seconds = STEP_SECONDS * (1 + long) * draw.gauss(1, NOISE)
        times, computing = [seconds] * RANKS, [0.7 * seconds] * RANKS
        steps.append({"step": number, "seconds": times, "compute_seconds": computing})
    return json.dumps({"trial": trial, "steps": steps}).encode()


def cpu_seconds(services: Sequence[int], url: str) -> list[float]:
    """Of each service, of PostgreSQL's processes, and of the whole machine."""
    port = str(make_url(url).port)
    postmaster = min(  # a process of its own looks like it for a moment
        (
            each
            for each in psutil.process_iter(["name", "cmdline"])
            if each.info["name"] == "postgres" and port in (each.info["cmdline"] or ())
        ),
        key=psutil.Process.create_time,
    )
    own = [_used(psutil.Process(pid)) for pid in services]
    ended = postmaster.cpu_times()
    database = sum(map(_used, [postmaster, *postmaster.children(recursive=True)]))
    machine = psutil.cpu_times()
    busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
    return [*own, database + ended.children_user + ended.children_system, busy]


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
