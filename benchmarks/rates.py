"""How many requests the service handles: beside Bagua's own, of a cluster's jobs, at its limit.

Beside Bagua's service (0.9.2 under gevent), in turns, same client, same bodies: pairs of a report
and an ask from 64 connections, each with models of its own, first while none is tuned yet and then
while all are; and how long another client's health check takes while 4 models are tuned and
proposals are computed. Goals: 3 times the pairs a second; 95 % of the health checks below 50 ms.

Of a cluster: 1,000 jobs of 8 ranks report 2 steps each every 2 s, to two replicas on one PostgreSQL
of its own (without fsync), first while all warm up and nothing is decided, then while all are
tuned. Seconds count from when a report was due. Goal: 99 % below 100 ms; where that is missed, half
as many jobs are tried, until they hold.

Of jobs of which half are tuned, each of 8 ranks that report every step of 2 s, while all others
watch, and more watch beside: they say every 45 s that they run. Goal: 99 % of the reports within
100 ms; where that is missed, half as many are tried, until they hold. What holds is then measured
for longer: the steps of jobs to their winner beside the same jobs alone, memory, connections, and
what an hour at that load leaves in the database, by copies of a tuning.

At its limit: 16 connections report one step of 8 ranks at a time, in turns for 400 jobs, to one
process, or several, on SQLite and, where it is installed, on a PostgreSQL of its own. Nothing is
decided meanwhile. Goals: 1,200 reports a second on SQLite, 500 on PostgreSQL.

Its scrapes: ``/metrics`` of a SQLite store with 10,000 jobs that are over, and 200 that report
before each scrape or do not. Goal: a median below 200 ms. The first scrape after a start makes all
texts: it takes longer, and stands in a column of its own.

The clients share the machine, so all rates are lower bounds.

    python benchmarks/rates.py --json rates.json
    python benchmarks/rates.py --parts cluster --jobs 250 --cluster-seconds 10
    python benchmarks/rates.py --parts mixed --jobs 1000 --watching 5000
    python benchmarks/rates.py --parts limit --processes 1 2
    python benchmarks/rates.py --parts scrapes
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.bagua_0_9.pairs import Worker, work
from benchmarks.support.bagua_0_9.service import bagua_service
from benchmarks.support.harness import print_table, write_json
from benchmarks.support.load import Connection, results, working
from benchmarks.support.many_jobs import MOST_P99_MS, Load, find_most
from benchmarks.support.mixed_jobs import measure_all
from benchmarks.support.one_process import Rate, measure_rates
from benchmarks.support.scrapes import MOST_SCRAPE_MS, Scrapes, measure_scrapes
from benchmarks.support.serving import serving
from benchmarks.testbed import Host

LEAST_RATIO, LEAST_RATIO_TUNED = 1.0, 5.0
MOST_HEALTH_MS = 50.0
HEALTH_EVERY_SECONDS = 0.02
LONG_SECONDS = 86_400
TRIAL_SECONDS = 0.1
"""Of Bagua's 5, that many proposals are computed in a short time."""
TUNED_PAUSE_SECONDS = 0.1
SETTLING_SECONDS = 2.0
TUNED_SETTLING_SECONDS = 5.0
"""Bagua's first 20 proposals are drawn, not computed."""
BAGUA, OURS = "Bagua 0.9.2", "ours"


@dataclass(frozen=True)
class Condition:
    """What a service is loaded with; each connection has models of its own, tuned or not yet."""

    is_tuned: bool
    connections: int
    seconds: float
    pause_seconds: float = 0.0

    def __str__(self) -> str:
        return f"{'tuned' if self.is_tuned else 'warming up'}, {self.connections} connections"

    @property
    def settling_seconds(self) -> float:
        return TUNED_SETTLING_SECONDS if self.is_tuned else SETTLING_SECONDS


@dataclass(frozen=True)
class Window:
    """Of one service, loaded for some time; another client's health checks beside it."""

    service: str
    condition: Condition
    pairs_per_second: float
    proposals_per_second: float
    health_median_ms: float
    health_p95_ms: float


def measure_window(service: str, port: int, name: str, condition: Condition) -> Window:
    """Load one service with models that it has never heard of."""
    begin = time.monotonic() + condition.settling_seconds
    end = begin + condition.seconds
    workers = [
        Worker(port, f"{name}-{place}", begin, end, condition.is_tuned, condition.pause_seconds)
        for place in range(condition.connections)
    ]
    with working(work, workers) as futures:
        time.sleep(max(0.0, begin - time.monotonic()))
        health = [1e3 * latency for latency in check_health(port, end)]
        sent = results(futures)
    return Window(
        service=service,
        condition=condition,
        pairs_per_second=sum(each.pairs for each in sent) / condition.seconds,
        proposals_per_second=sum(each.proposals for each in sent) / condition.seconds,
        health_median_ms=median(health),
        health_p95_ms=quantiles(health, n=20)[18],
    )


def check_health(port: int, end: float) -> Iterator[float]:
    """Seconds that a check takes for a client that comes every 20 ms, also while another waits."""
    connection = Connection(port)
    while (began := time.monotonic()) < end:
        connection.get("/api/v1/health_check")
        waited = time.monotonic() - began
        time.sleep(max(0.0, HEALTH_EVERY_SECONDS - waited))
        while waited > 0:
            yield waited
            waited -= HEALTH_EVERY_SECONDS


@contextmanager
def services(folder: Path, is_tuned: bool) -> Iterator[dict[str, int]]:
    """Both, for jobs of one rank; their ports.

    Raises:
        RuntimeError: Bagua's service cannot be had.
    """
    warmup, trial = (0, TRIAL_SECONDS) if is_tuned else (LONG_SECONDS, LONG_SECONDS)
    environment = {
        "WORLD_SIZE": "1",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S": str(warmup),
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": str(trial),
    }
    host = Host("here", "127.0.0.1", "lo")
    limits: dict[str, Any] = {"warmup_seconds": warmup, "confidence_seconds": trial}
    with ExitStack() as stack:
        address = stack.enter_context(bagua_service(host, 1, folder, **limits))
        ours = stack.enter_context(serving(f"sqlite:///{folder}/autotune.db", **environment))
        yield {BAGUA: int(address.rsplit(":", 1)[1]), OURS: ours.port}


def measure_beside(condition: Condition, rounds: int) -> Iterator[Window]:
    """The two services in turns."""
    with (
        tempfile.TemporaryDirectory() as folder,
        services(Path(folder), condition.is_tuned) as ports,
    ):
        for turn in range(rounds):
            for service, port in ports.items():
                yield measure_window(service, port, f"turn-{turn}", condition)


def show_beside(windows: Sequence[Window]) -> None:
    """Medians over the turns, with their range."""
    columns: dict[str, Callable[[Window], float]] = {
        "pairs/s": lambda w: w.pairs_per_second,
        "proposals/s": lambda w: w.proposals_per_second,
        "health ms": lambda w: w.health_median_ms,
        "health p95 ms": lambda w: w.health_p95_ms,
    }
    conditions = dict.fromkeys(each.condition for each in windows)
    kinds = {
        (condition, service): [
            each for each in windows if (each.condition, each.service) == (condition, service)
        ]
        for condition in conditions
        for service in (BAGUA, OURS)
    }
    rows = [
        [str(condition), service]
        + [_spread([value(each) for each in found]) for value in columns.values()]
        for (condition, service), found in kinds.items()
    ]
    print_table(["models", "service", *columns], rows)
    for condition in conditions:
        pairs = zip(kinds[condition, BAGUA], kinds[condition, OURS], strict=True)
        ratios = [ours.pairs_per_second / bagua.pairs_per_second for bagua, ours in pairs]
        if condition.pause_seconds:
            _show_health_goal(condition, kinds[condition, OURS])
        else:
            least = LEAST_RATIO_TUNED if condition.is_tuned else LEAST_RATIO
            goal = f"{condition}: at least {least:g} x Bagua's pairs a second"
            show_goal(goal, f"{_spread(ratios, 2)} x", median(ratios) >= least)


def _show_health_goal(condition: Condition, ours: Sequence[Window]) -> None:
    p95 = median(each.health_p95_ms for each in ours)
    goal = f"{condition}: p95 of another client's health check below {MOST_HEALTH_MS:g} ms"
    show_goal(goal, f"{p95:.1f} ms", p95 < MOST_HEALTH_MS)


def _spread(values: Sequence[float], digits: int = 1) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def show_cluster(loads: Sequence[Load]) -> None:
    """All counts that were tried, and whether the first of each kind held."""
    head = ("jobs", "which", "reports/s", "median ms", "p99 ms", "errors", "trials/s")
    rows = [
        (
            str(each.jobs),
            "warming up" if each.is_warming_up else "tuned",
            f"{each.reports_per_second:.0f}",
            f"{each.median_ms:.1f}",
            f"{each.p99_ms:.1f}",
            str(each.errors),
            f"{each.trials_per_second:.1f}",
            " + ".join(f"{cores:.2f}" for cores in each.replica_cores),
            f"{each.database_cores:.2f}",
            f"{each.other_cores:.2f}",
        )
        for each in loads
    ]
    print_table((*head, "replicas' cores", "PostgreSQL's", "others'"), rows)
    for is_warming_up in dict.fromkeys(each.is_warming_up for each in loads):
        tried = [each for each in loads if each.is_warming_up == is_warming_up]
        first, last = tried[0], tried[-1]
        which = "that warm up" if is_warming_up else "that are tuned"
        goal = f"p99 of {first.jobs} jobs {which} at most {MOST_P99_MS:g} ms, no errors"
        show_goal(goal, f"{first.p99_ms:.1f} ms, {first.errors} errors", first.holds)
        if not first.holds:
            most = f"{last.jobs} jobs hold" if last.holds else "no number of jobs holds"
            print(f"  {most}; at {first.jobs} the bound is {first.bound}")


def show_limit(rates: Sequence[Rate]) -> None:
    """On each database, and whether the goals are met."""
    rows = [
        (
            each.database,
            str(each.processes),
            f"{each.reports_per_second:.0f}",
            f"{each.cpu_ms:.2f}",
            f"{each.median_ms:.1f}",
            f"{each.p99_ms:.1f}",
        )
        for each in rates
    ]
    print_table(("database", "processes", "reports/s", "CPU ms", "median ms", "p99 ms"), rows)
    for each in rates:
        which = (
            f"{each.database}, {each.processes} processes" if each.processes > 1 else each.database
        )
        goal = f"{which}: at least {each.goal:,.0f} reports a second"
        found = each.reports_per_second
        show_goal(goal, f"{found:.0f}", found >= each.goal)


def show_scrapes(found: Sequence[Scrapes]) -> None:
    """Of each store, and whether the goal is met; medians with their range."""
    head = ("jobs over", "which", "live", "shown", "first ms", "unchanged ms", "live reported, ms")
    rows = [
        (
            f"{each.jobs:,}",
            each.past,
            str(each.live),
            f"{each.shown:,}",
            f"{each.first_ms:.0f}",
            _spread(each.still_ms, 0),
            _spread(each.changed_ms, 0),
            f"{each.answer_bytes / 1e6:.1f}",
        )
        for each in found
    ]
    print_table((*head, "MB"), rows)
    for each in found:
        goal = f"{each.past}: a scrape's median below {MOST_SCRAPE_MS:g} ms"
        show_goal(goal, f"{each.worst_median_ms:.0f} ms", each.holds)


def show_goal(goal: str, found: str, is_met: bool) -> None:
    print(f"{goal}: {found}: {'met' if is_met else 'missed'}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--connections", type=int, default=64, help="connections that send pairs")
    parser.add_argument(
        "--tuned", type=int, default=4, help="models being tuned during health checks"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds for each service")
    parser.add_argument("--seconds", type=float, default=8.0, help="time of pairs in a round")
    parser.add_argument(
        "--tuned-seconds", type=float, default=15.0, help="time of health checks in a round"
    )
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs of the cluster")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--cluster-seconds", type=float, default=20.0, help="time for each number of jobs"
    )
    parser.add_argument("--watching", type=int, default=5000, help="jobs that only watch, beside")
    parser.add_argument(
        "--mixed-seconds", type=float, default=60.0, help="time for each number of mixed jobs"
    )
    parser.add_argument(
        "--tuning-seconds", type=float, default=240.0, help="time for tunings, alone and beside"
    )
    parser.add_argument("--limit-seconds", type=float, default=8.0, help="time for each database")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1], help="of the service at its limit"
    )
    parser.add_argument("--stored", type=int, default=10_000, help="jobs of a store, for scrapes")
    parser.add_argument("--live", type=int, default=200, help="further jobs of it, which report")
    parser.add_argument("--scrapes", type=int, default=15, help="scrapes of each kind")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser.parse_args()


def compare_with_bagua(options: argparse.Namespace) -> list[dict[str, Any]]:
    windows: list[Window] = []
    for condition in (
        Condition(False, options.connections, options.seconds),
        Condition(True, options.connections, options.seconds),
        Condition(True, options.tuned, options.tuned_seconds, TUNED_PAUSE_SECONDS),
    ):
        windows += measure_beside(condition, options.rounds)
    show_beside(windows)
    return [asdict(each) for each in windows]


def load_cluster(options: argparse.Namespace) -> list[dict[str, Any]]:
    loads: list[Load] = []
    for is_warming_up in (True, False):
        loads += find_most(options.jobs, options.replicas, options.cluster_seconds, is_warming_up)
    show_cluster(loads)
    return [asdict(each) | {"bound": each.bound} for each in loads]


def load_mixed(options: argparse.Namespace) -> dict[str, Any]:
    size = (options.jobs, options.watching, options.replicas)
    return measure_all(*size, options.mixed_seconds, options.tuning_seconds)


def find_limit(options: argparse.Namespace) -> list[dict[str, Any]]:
    rates = measure_rates(options.limit_seconds, options.processes)
    show_limit(rates)
    return [asdict(each) for each in rates]


def time_scrapes(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = measure_scrapes(options.stored, options.live, options.scrapes)
    show_scrapes(found)
    return [asdict(each) for each in found]


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "bagua": compare_with_bagua,
    "cluster": load_cluster,
    "mixed": load_mixed,
    "limit": find_limit,
    "scrapes": time_scrapes,
}


def main() -> None:
    options = parse_options()
    content: dict[str, Any] = {
        "options": {name: str(value) for name, value in vars(options).items()}
    }
    for name, measure in PARTS.items():
        if name in options.parts:
            content[name] = measure(options)
    if options.json:
        write_json(options.json, content)


if __name__ == "__main__":
    main()
