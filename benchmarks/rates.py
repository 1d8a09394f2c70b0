"""How many requests the service handles: of a cluster's jobs, at its limit, and its scrapes.

Of a cluster: 1,000 jobs of 8 ranks report 2 steps each every 2 s, to two replicas on one PostgreSQL
of its own (without fsync), first while all warm up and nothing is decided, then while all are
tuned. Seconds count from when a report was due. Goal: 99 % below 100 ms; where that is missed, half
as many jobs are tried, until they hold.

At its limit: 16 connections report one step of 8 ranks at a time, in turns for 400 jobs, to one
process, or several, on SQLite and, where it is installed, on a PostgreSQL of its own. Nothing is
decided meanwhile. Goals: 1,200 reports a second on SQLite, 500 on PostgreSQL.

Its scrapes: ``/metrics`` of a SQLite store with 10,000 jobs that are over, and 200 that report
before each scrape or do not. Goal: a median below 200 ms. The first scrape after a start makes all
texts: it takes longer, and stands in a column of its own.

The clients share the machine, so all rates are lower bounds.

    python benchmarks/rates.py --json rates.json
    python benchmarks/rates.py --parts cluster --jobs 250 --cluster-seconds 10
    python benchmarks/rates.py --parts limit --processes 1 2
    python benchmarks/rates.py --parts scrapes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.harness import as_given, print_table, write_json
from benchmarks.support.rates.cluster import MOST_P99_MS, Load, find_most
from benchmarks.support.rates.load import Rate, measure_rates
from benchmarks.support.rates.scrapes import MOST_SCRAPE_MS, Scrapes, measure_scrapes


def _spread(values: Sequence[float], digits: int) -> str:
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
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs of the cluster")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--cluster-seconds", type=float, default=20.0, help="time for each number of jobs"
    )
    parser.add_argument("--limit-seconds", type=float, default=8.0, help="time for each database")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1], help="of the service at its limit"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser.parse_args()


def load_cluster(options: argparse.Namespace) -> list[dict[str, Any]]:
    loads: list[Load] = []
    for is_warming_up in (True, False):
        loads += find_most(options.jobs, options.replicas, options.cluster_seconds, is_warming_up)
    show_cluster(loads)
    return [asdict(each) | {"bound": each.bound} for each in loads]


def find_limit(options: argparse.Namespace) -> list[dict[str, Any]]:
    rates = measure_rates(options.limit_seconds, options.processes)
    show_limit(rates)
    return [asdict(each) for each in rates]


def time_scrapes(options: argparse.Namespace) -> list[dict[str, Any]]:
    found = measure_scrapes()
    show_scrapes(found)
    return [asdict(each) for each in found]


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "cluster": load_cluster,
    "limit": find_limit,
    "scrapes": time_scrapes,
}


def main() -> None:
    options = parse_options()
    content: dict[str, Any] = {"options": as_given(options)}
    for name, measure in PARTS.items():
        if name in options.parts:
            content[name] = measure(options)
    if options.json:
        write_json(options.json, content)


if __name__ == "__main__":
    main()
