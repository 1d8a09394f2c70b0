"""Tunings of short jobs while the service is killed, restarted, frozen and cut off, behind a proxy.

The proxy drops, delays, duplicates or garbles every tenth request. Most jobs are simulated: their
steps take the simulator's time, and the client's own reporter tells them over HTTP to a real
``bagua-autotune serve``. Every tenth is a real training of two processes beside a stock twin.

What must hold: no step lost, no rank stuck, each job ends within 5 % of the best configuration or
at its default with a reason, nothing that was acknowledged is lost, the store is whole. The exit
status is 1 if something does not.

    python benchmarks/faults.py --seed 1 --tunings 50 --json faults.json
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the tests' service and ranks

from fault_injection.books import Books, audit
from fault_injection.served_job import Lines, ReportingTuner, ServedJob
from fault_injection.trouble import TroubledService
from harness import print_table, write_json
from tuning import truth

from bagua_simulator import cases
from tests.e2e.conftest import LIMITS
from tests.e2e.training import DEFAULT, train
from tests.ranks import RankPool

REAL_EVERY, FIRST_REAL = 10, 4
MOST_SECONDS = 600.0
MOST_REAL_STEPS = 8000
LONGEST_CALL_SECONDS = 1.0
"""Of the training thread to the reporter, on a machine whose cores others use, too."""
SERVER_WAIT_SECONDS = 10.0
TOLERANCE = 0.05
ROUNDING = 1e-5


@dataclass(frozen=True)
class Setting:
    """One tuning."""

    number: int
    seed: int
    url: str


@dataclass(frozen=True)
class Ended:
    """How a tuning ended.

    Attributes:
        lost_steps: that were not made, or waited for the service.
        stuck_ranks: that had not ended when they should have long.
        place: the configuration it ended at: "default", or "winner".
        over_best: its true step time over the best one's, minus 1; None: real jobs have no truth.
        reason: the last words of the client on it.
        seconds: from its first step to its last.
    """

    number: int
    problem: str
    lost_steps: int
    stuck_ranks: int
    place: str
    over_best: float | None
    reason: str
    seconds: float

    @property
    def is_right(self) -> bool:
        is_good = self.over_best is None or self.over_best <= TOLERANCE
        has_reason = self.place == "default" and bool(self.reason)
        return not self.lost_steps and not self.stuck_ranks and (is_good or has_reason)


def tune(setting: Setting) -> Ended:
    """A simulated job; in a process of its own."""
    lines = Lines()
    logging.getLogger("bagua_client").addHandler(lines)
    logging.getLogger("bagua_client").setLevel(logging.INFO)
    named = [each for each in cases() if each.simulator.cluster.nodes == 4]
    problem = named[setting.number % len(named)]
    began = time.monotonic()
    seed = 1000 * setting.seed + setting.number
    tuner = ReportingTuner(setting.url, SERVER_WAIT_SECONDS)
    job = ServedJob(tuner, problem.simulator, "job", seed, fingerprint=str(seed))
    while not job.is_finished and time.monotonic() - began < MOST_SECONDS:
        job.run(1)
    seconds = time.monotonic() - began
    tuner.reporter.close(5.0)
    logging.getLogger("bagua_client").removeHandler(lines)
    best = min(truth(problem.simulator).values())
    return Ended(
        number=setting.number,
        problem=problem.name,
        lost_steps=int(tuner.longest_call_seconds > LONGEST_CALL_SECONDS),
        stuck_ranks=0 if job.is_finished else problem.simulator.cluster.world_size,
        place="default" if job.configuration == job.baseline else "winner",
        over_best=job.true_seconds(job.configuration) / best - 1,
        reason=_last_words(lines.lines),
        seconds=seconds,
    )


def tune_for_real(setting: Setting) -> Ended:
    """A training of two processes with gloo, whose steps take what they take."""
    variables = {**LIMITS, "BAGUA_AUTOTUNE_URL": setting.url}
    pool = RankPool([2], variables=variables)
    began = time.monotonic()
    try:
        outcomes = pool.outcomes(train, MOST_REAL_STEPS, timeout_seconds=MOST_SECONDS)
    finally:
        pool.close()
    seconds = time.monotonic() - began
    failed = [rank for rank, outcome in outcomes.items() if outcome.error is not None]
    reports = [outcomes[rank].result for rank in sorted(outcomes) if rank not in failed]
    steps = [report.steps for report in reports]
    wrong = [
        report
        for report in reports
        if report.difference > ROUNDING or report.configurations != reports[0].configurations
    ]
    errors = [str(outcomes[rank].error).splitlines()[-1] for rank in failed]
    is_tuned = bool(reports) and reports[0].tuned
    return Ended(
        number=setting.number,
        problem="two real processes",
        lost_steps=len(wrong) + (max(steps) - min(steps) if steps else 0),
        stuck_ranks=len(failed) if failed or is_tuned else len(reports),
        place="default" if reports and reports[0].configurations[-1] == DEFAULT else "winner",
        over_best=None,
        reason="; ".join(errors) or _last_words(reports[0].logged),
        seconds=seconds,
    )


def _last_words(lines: Sequence[str]) -> str:
    told = [line for line in lines if " over the " in line or "is off" in line or "kept" in line]
    return (told or lines or [""])[-1].partition("autotune")[2].lstrip(": ")


def run(settings: Sequence[Setting], at_once: int) -> Iterator[Ended]:
    """All of them: simulated jobs beside one another, and real ones, which need cores, in turn."""
    real = [setting for setting in settings if setting.number % REAL_EVERY == FIRST_REAL]
    simulated = [setting for setting in settings if setting not in real]
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as processes:
        found = processes.map(tune, simulated)
        for setting in real:
            yield tune_for_real(setting)
        yield from found


def show(ended: Sequence[Ended], books: Books) -> bool:
    """Print what became of each and of all; whether all is right."""
    rows = [
        (
            str(each.number),
            each.problem,
            f"{each.seconds:.0f}",
            each.place,
            "" if each.over_best is None else f"{each.over_best:.1%}",
            "" if each.is_right else "WRONG",
            each.reason[:90],
        )
        for each in ended
    ]
    print_table(("tuning", "problem", "s", "ended at", "over best", "", "last words"), rows)
    within = sum(each.over_best is not None and each.over_best <= TOLERANCE for each in ended)
    figures = {
        "tunings": len(ended),
        "steps lost": sum(each.lost_steps for each in ended),
        "ranks stuck": sum(each.stuck_ranks for each in ended),
        f"simulated, within {TOLERANCE:.0%} of the best": within,
        "of the others not at the default with a reason": sum(not e.is_right for e in ended),
        "acknowledged reports": books.acknowledged,
        "acknowledged and lost": len(books.lost),
        "damage to the store": len(books.damage),
    }
    print_table(("figure", ""), [(name, str(value)) for name, value in figures.items()])
    for line in itertools.islice([*books.lost, *books.damage], 20):
        print(line)
    return all(each.is_right for each in ended) and not books.lost and not books.damage


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tunings", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=10, help="simulated jobs beside one another")
    parser.add_argument("--json", type=Path, help="write every figure here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "store.db"
        with TroubledService(database, options.seed) as troubled:
            url = troubled.proxy.url
            settings = [Setting(n, options.seed, url) for n in range(options.tunings)]
            ended = sorted(run(settings, options.at_once), key=lambda each: each.number)
        books = audit(database, troubled.proxy.acknowledged)
    proxy = troubled.proxy
    print(f"troubles: {dict(troubled.troubles)}")
    print(f"faults in {proxy.requests} requests: {dict(proxy.faults)}")
    is_right = show(ended, books)
    if options.json:
        content = {
            "options": {name: str(value) for name, value in vars(options).items()},
            "troubles": troubled.troubles,
            "requests": proxy.requests,
            "faults": proxy.faults,
            "tunings": [asdict(each) for each in ended],
            "books": asdict(books),
        }
        write_json(options.json, content)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
