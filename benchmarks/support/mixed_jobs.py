"""Jobs of which half are being tuned while all others watch, on replicas with one PostgreSQL."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median, quantiles
from typing import Any

import psutil
from sqlalchemy import create_engine, text

from bagua_autotune.model.job import Result
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.trials import Step
from benchmarks.support import mixed_clients
from benchmarks.support.harness import print_table
from benchmarks.support.load import Connection, results, working
from benchmarks.support.many_jobs import MOST_P99_MS, cpu_seconds
from benchmarks.support.mixed_clients import Ranks, Slot, Watchers, body, report
from benchmarks.support.scrapes import copy_job
from benchmarks.support.serving import DEFAULT, Service, register, serving
from tests.autotune.store.postgresql import find_binaries, running_cluster

WATCHERS_AT_ONCE = 50
"""One thread renews so many, each over a connection of its own."""
SETTLING_SECONDS = 20.0
ALONE = 4
LEAST_SHARE = 0.99
HOUR_SECONDS = 3600.0
DECISION_SECONDS = 0.2
"""From one step of the tuning that is copied to the next: what follows is decided meanwhile."""
MIB = 2**20


@dataclass(frozen=True)
class Mixed:
    """What such jobs did to the service; processor time in cores, memory in MiB.

    Attributes:
        jobs: all but those that only watch beside.
        offered_per_second: reports that were due.
        reports_per_second: of these, answered before the end.
        share: of reports, answered within MOST_P99_MS.
        steps: until the winner was known, of each job that ended.
        connections: of each replica.
        database_mib: at the end.
    """

    jobs: int
    watching: int
    seconds: float
    offered_per_second: float
    reports_per_second: float
    share: float
    median_ms: float
    p99_ms: float
    lease_p99_ms: float
    errors: int
    steps: Mapping[str, int]
    replica_cores: Sequence[float]
    database_cores: float
    other_cores: float
    memory_mib: Sequence[float]
    connections: Sequence[int]
    database_connections: int
    database_mib: float

    @property
    def holds(self) -> bool:
        return self.share >= LEAST_SHARE and not self.errors


@dataclass(frozen=True)
class Hour:
    """What a database holds after an hour at a load: ``tunings`` of so many jobs."""

    jobs: int
    watching: int
    tunings: int
    observations: int
    database_mib: float


def measure_mixed(jobs: int, watching: int, replicas: int, seconds: float) -> Mixed:
    """On an empty database; half of the jobs are tuned, the others and ``watching`` more watch.

    Raises:
        RuntimeError: PostgreSQL is not installed.
    """
    with _running(replicas) as (url, services):
        job_ids = [f"watch-{number:05}" for number in range(jobs // 2 + watching)]
        _register_tuned(url, job_ids)
        start = time.monotonic() + 2
        begin, end = start + SETTLING_SECONDS, start + SETTLING_SECONDS + seconds
        ports = [each.port for each in services]
        clients = _clients((jobs + 1) // 2, job_ids, ports, (start, begin, end))
        pids = [each.pid for each in services]
        with working(mixed_clients.work, clients) as futures:
            time.sleep(max(0.0, begin - time.monotonic()))
            before = cpu_seconds(pids, url)
            time.sleep(max(0.0, end - 1 - time.monotonic()))
            spent = zip(before, cpu_seconds(pids, url), strict=True)
            memory = [psutil.Process(pid).memory_info().rss / MIB for pid in pids]
            connections = [_connections(each) for each in services]
            used, size = _look_at(url)
            found = results(futures)
    *own, database, machine = ((last - first) / (seconds - 1) for first, last in spent)
    reports = [1e3 * each for each in chain.from_iterable(one.reports for one in found)]
    leases = [1e3 * each for each in chain.from_iterable(one.leases for one in found)]
    errors = sum(one.errors for one in found)
    return Mixed(
        jobs=jobs,
        watching=watching,
        seconds=seconds,
        offered_per_second=len(reports) / seconds,
        reports_per_second=sum(one.in_time for one in found) / seconds,
        share=sum(each <= MOST_P99_MS for each in reports) / max(1, len(reports)),
        median_ms=median(reports),
        p99_ms=quantiles(reports, n=100)[98],
        lease_p99_ms=quantiles(leases, n=100)[98] if len(leases) > 1 else math.nan,
        errors=errors,
        steps={job: count for one in found for job, count in one.steps.items()},
        replica_cores=own,
        database_cores=database,
        other_cores=max(0.0, machine - sum(own) - database),
        memory_mib=memory,
        connections=connections,
        database_connections=used,
        database_mib=size / MIB,
    )


def _clients(
    slots: int, watching: Sequence[str], ports: Sequence[int], times: tuple[float, float, float]
) -> list[Slot | Watchers]:
    """Who loads the services: ``slots`` that are tuned, and all who watch.

    Args:
        watching: their jobs.
        times: of the first request, of the first that counts, and the end.
    """
    start, *counted = times
    each_seconds = mixed_clients.STEP_SECONDS / slots
    threads = math.ceil(len(watching) / WATCHERS_AT_ONCE)
    return [
        *(
            Slot(f"slot-{n:04}", ports[n % len(ports)], start + n * each_seconds, *counted)
            for n in range(slots)
        ),
        *(Watchers(watching[n::threads], ports[n % len(ports)], *times) for n in range(threads)),
    ]


def find_mixed(jobs: int, watching: int, replicas: int, seconds: float) -> list[Mixed]:
    """Half as many of both, until they hold; of all counts that were tried."""
    found = [measure_mixed(jobs, watching, replicas, seconds)]
    while not found[-1].holds and found[-1].jobs > 2:
        jobs, watching = found[-1].jobs // 2, found[-1].watching // 2
        found.append(measure_mixed(jobs, watching, replicas, seconds))
    return found


def measure_hour(jobs: int, watching: int) -> Hour:
    """What an hour stores: a tuned job, copied as often as the slots tune one.

    Raises:
        RuntimeError: PostgreSQL is not installed.
    """
    with _running(1) as (url, (service,)):
        _register_tuned(url, [f"watch-{number:05}" for number in range(jobs // 2 + watching)])
        ranks = Ranks("original")
        connection = Connection(service.port)
        connection.put("/api/v2/jobs/original", body("original"))
        while not ranks.is_over:
            report(connection, "original", ranks)
            time.sleep(DECISION_SECONDS)
        tunings = round((jobs + 1) // 2 * HOUR_SECONDS / mixed_clients.STEP_SECONDS / ranks.steps)
        engine = create_engine(url)
        with engine.begin() as database:
            copy_job(database, "original", tunings)
            stored = database.scalar(text("SELECT COUNT(*) FROM observations"))
        engine.dispose()
        _, size = _look_at(url)
    return Hour(jobs, watching, tunings, int(stored or 0), size / MIB)


def measure_all(
    jobs: int, watching: int, replicas: int, seconds: float, tuning_seconds: float
) -> dict[str, Any]:
    """Measure, and print, what the table in reports/2026-11-service.md has; all figures."""
    tried = find_mixed(jobs, watching, replicas, seconds)
    jobs, watching = tried[-1].jobs, tried[-1].watching
    alone = measure_mixed(2 * ALONE, 0, replicas, tuning_seconds)
    beside = measure_mixed(jobs, watching, replicas, tuning_seconds)
    hour = measure_hour(jobs, watching)
    show_mixed(tried, alone, beside, hour)
    goal = f"{LEAST_SHARE:.0%} of the reports of {tried[0].jobs:,} jobs within {MOST_P99_MS:g} ms"
    print(f"{goal}: {tried[0].share:.1%}: {'met' if tried[0].holds else 'missed'}", flush=True)
    return {
        "tried": [asdict(each) for each in tried],
        "alone": asdict(alone),
        "beside": asdict(beside),
        "hour": asdict(hour),
    }


def show_mixed(tried: Sequence[Mixed], alone: Mixed, beside: Mixed, hour: Hour) -> None:
    """All counts that were tried; of the largest that holds, whether jobs find their winner as soon
    as alone; and what an hour at it stores."""
    head = ("jobs", "watch beside", "offered/s", "reports/s", "within 100 ms", "median ms")
    head += ("p99 ms", "leases' p99 ms", "errors", "replicas' cores", "PostgreSQL's", "others'")
    rows = [
        (
            f"{each.jobs:,}",
            f"{each.watching:,}",
            f"{each.offered_per_second:.0f}",
            f"{each.reports_per_second:.0f}",
            f"{each.share:.2%}",
            f"{each.median_ms:.1f}",
            f"{each.p99_ms:.1f}",
            f"{each.lease_p99_ms:.1f}",
            str(each.errors),
            " + ".join(f"{cores:.2f}" for cores in each.replica_cores),
            f"{each.database_cores:.2f}",
            f"{each.other_cores:.2f}",
        )
        for each in [*tried, beside]
    ]
    print_table(head, rows)
    both = alone.steps.keys() & beside.steps.keys()
    pairs = [(alone.steps[job], beside.steps[job]) for job in sorted(both)]
    figures = {
        "steps to the winner, alone": _middle([first for first, _ in pairs]),
        "the same jobs beside all others": _middle([second for _, second in pairs]),
        "of all jobs beside": _middle(list(beside.steps.values())),
        "memory of the replicas, MiB": " + ".join(f"{each:.0f}" for each in beside.memory_mib),
        "their connections": " + ".join(map(str, beside.connections)),
        "PostgreSQL's connections": str(beside.database_connections),
        "database, MiB": f"{beside.database_mib:.0f}",
        f"after an hour: tunings of {hour.jobs:,} jobs, {hour.watching:,} beside": (
            f"{hour.tunings:,}"
        ),
        "observations then": f"{hour.observations:,}",
        "database then, MiB": f"{hour.database_mib:.0f}",
    }
    print_table(("figure", ""), list(figures.items()))


def _middle(steps: Sequence[int]) -> str:
    if not steps:
        return "none ended"
    return f"{median(steps):g} ({min(steps)} to {max(steps)}, {len(steps)} jobs)"


@contextmanager
def _running(replicas: int) -> Iterator[tuple[str, list[Service]]]:
    binaries = find_binaries()
    if binaries is None:
        raise RuntimeError("PostgreSQL is not installed")
    with ExitStack() as stack:
        url = stack.enter_context(running_cluster(binaries))
        yield url, [stack.enter_context(serving(url)) for _ in range(replicas)]


def _register_tuned(url: str, job_ids: Sequence[str]) -> None:
    """Store jobs whose tuning ended, at their default."""
    register(url, list(job_ids), 0)
    store = Store(url)
    found = Estimate(mixed_clients.STEP_SECONDS, 0.01 * mixed_clients.STEP_SECONDS, 10)
    default = Configuration(DEFAULT)
    for job_id in job_ids:
        at = time.time()
        result = Result(default, "baseline", 1.0, 1.0, 1.0, 1, 10, 20.0, "the default kept")
        store.advance(job_id, Step(at, 0, found, result=result))
    store.close()


def _connections(service: Service) -> int:
    """That clients have to it."""
    found = psutil.Process(service.pid).net_connections("tcp")
    return sum(each.status == "ESTABLISHED" and each.laddr.port == service.port for each in found)


def _look_at(url: str) -> tuple[int, int]:
    """How many connections a database has, without this one, and its bytes."""
    engine = create_engine(url)
    with engine.connect() as database:
        used = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()"
        size = "SELECT pg_database_size(current_database())"
        found = int(database.scalar(text(used)) or 0) - 1, int(database.scalar(text(size)) or 0)
    engine.dispose()
    return found
