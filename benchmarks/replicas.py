"""Tunes jobs by several replicas: one is killed every few seconds, and PostgreSQL crashes once.

The replicas of ``bagua-autotune serve`` share a PostgreSQL of their own (without fsync: the machine
does not crash). A proxy lets each have its turn, request by request. The jobs are simulated, all at
once: their steps take the simulator's time, and the client's own reporter tells them over HTTP.

What must hold: no step lost, no rank stuck, each job ends within 5 % of the best configuration or
at its default with a reason, nothing that was acknowledged is lost, the store is whole, nothing is
answered by a 500, and no decision is taken twice: none was made for nothing, and no more were made
than steps were taken, but for those that failed with the database or ended with their replica. The
exit status is 1 if something does not.

    python benchmarks/replicas.py --seed 1 --replicas 2 4 --jobs 40 --json replicas.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from sqlalchemy import func, select

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import TrialRow
from bagua_autotune.tuning.background import MOST_AT_ONCE, SUPERFLUOUS
from benchmarks.support.fault_injection import tunings
from benchmarks.support.fault_injection.books import Books, audit
from benchmarks.support.fault_injection.replicas import FAILED, Replicas
from benchmarks.support.fault_injection.tunings import Ended, Setting, show
from benchmarks.support.harness import write_json
from tests.autotune.store.postgresql import (
    crash_and_restart,
    find_binaries,
    find_damage,
    running_cluster,
)

CRASH_AFTER = 3  # kills
PAUSE_SECONDS = 0.002  # of a job's step for each job: all of them share the machine


@dataclass(frozen=True)
class Outcome:
    """Of the jobs tuned by so many replicas.

    Attributes:
        steps: that jobs took: a trial was closed, and another, or a result, followed.
        decided: decisions that the replicas said they had made.
        failed: decisions that failed, and were made again.
        superfluous: decisions for a step that was taken already.
        troubles: what the replicas and their database met.
        statuses: how often requests were answered so.
    """

    replicas: int
    ended: Sequence[Ended]
    books: Books
    steps: int
    decided: int
    failed: int
    superfluous: int
    troubles: Mapping[str, int]
    statuses: Mapping[int, int]

    @property
    def unaccounted(self) -> int:
        """Decisions beyond those that jobs needed, or that can have been lost."""
        lost = self.failed + MOST_AT_ONCE * self.troubles.get("kill", 0)
        return max(0, self.decided - self.steps - lost)

    def show(self) -> bool:
        """Print it; whether all is right."""
        print(f"\n{self.replicas} replicas: {dict(self.troubles)}, answers {dict(self.statuses)}")
        others = {
            "answered by a 500": self.statuses.get(500, 0),
            "steps decided": self.steps,
            "decisions made": self.decided,
            "decisions that failed with the database": self.failed,
            "decisions made for nothing": self.superfluous,
            "decisions made that nothing explains": self.unaccounted,
        }
        is_once = not self.superfluous and not self.unaccounted
        has_crashed = bool(self.troubles.get("crash"))
        if not has_crashed:
            print("the tunings ended before PostgreSQL crashed: that shows too little")
        is_right = show(self.ended, self.books, others) and not self.statuses.get(500)
        return is_right and is_once and has_crashed


def tune(replicas: int, jobs: int, seed: int, crash_after: int = CRASH_AFTER) -> Outcome:
    """Let so many jobs be tuned at once."""
    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL is not installed")
    with tempfile.TemporaryDirectory() as folder, running_cluster(binaries) as url:
        crash = partial(crash_and_restart, binaries, url)
        with Replicas(url, replicas, Path(folder), seed, crash, crash_after) as troubled:
            pause_seconds = jobs * PAUSE_SECONDS
            address = troubled.proxy.url
            settings = [Setting(n, seed, address, pause_seconds) for n in range(jobs)]
            ended = list(tunings.run(settings, at_once=jobs))
        books = audit(url, troubled.proxy.acknowledged)
        damage = books.damage + find_damage(url)
        return Outcome(
            replicas=replicas,
            ended=ended,
            books=replace(books, damage=damage),
            steps=_steps(url),
            decided=troubled.decided,
            failed=troubled.said(FAILED),
            superfluous=troubled.said(SUPERFLUOUS),
            troubles=dict(troubled.troubles),
            statuses=dict(troubled.proxy.statuses),
        )


def _steps(url: str) -> int:
    """Each closed a trial."""
    closed = select(func.count()).where(TrialRow.state.in_(("measured", "failed")))
    store = Store(url)
    with store.database.reading() as session:
        found = session.scalar(closed)
    store.close()
    return found or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--jobs", type=int, default=40, help="jobs being tuned at once")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    outcomes = [tune(replicas, options.jobs, options.seed) for replicas in options.replicas]
    right = [outcome.show() for outcome in outcomes]
    if options.json:
        content = {
            "options": {name: str(value) for name, value in vars(options).items()},
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }
        write_json(options.json, content)
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
