"""Tunes short jobs while the service, behind a proxy, is killed, restarted, frozen and cut off.

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
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.fault_injection import tunings
from benchmarks.support.fault_injection.trouble import TroubledService
from benchmarks.support.fault_injection.tunings import (
    MOST_SECONDS,
    Ended,
    Setting,
    audit,
    last_words,
    show,
)
from benchmarks.support.harness import as_given, write_json
from tests.e2e.conftest import LIMITS
from tests.e2e.programs.training import DEFAULT, train
from tests.ranks import RankPool

REAL_EVERY, FIRST_REAL = 10, 4
AT_ONCE = 10
"""Simulated jobs."""
MOST_REAL_STEPS = 8000
ROUNDING = 1e-5


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
        reason="; ".join(errors) or last_words(reports[0].logged),
        seconds=seconds,
    )


def run(settings: Sequence[Setting]) -> Iterator[Ended]:
    """All of them: simulated jobs beside one another, and real ones, which need cores, in turn."""
    real = [setting for setting in settings if setting.number % REAL_EVERY == FIRST_REAL]
    simulated = [setting for setting in settings if setting not in real]
    found = tunings.run(simulated, AT_ONCE)
    for setting in real:
        yield tune_for_real(setting)
    yield from found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tunings", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "store.db"
        with TroubledService(database, options.seed) as troubled:
            url = troubled.proxy.url
            settings = [Setting(n, options.seed, url) for n in range(options.tunings)]
            ended = sorted(run(settings), key=lambda each: each.number)
        books = audit(f"sqlite:///{database}", troubled.proxy.acknowledged)
    proxy = troubled.proxy
    print(f"troubles: {dict(troubled.troubles)}")
    print(f"faults in {proxy.requests} requests: {dict(proxy.faults)}")
    is_right = show(ended, books)
    if options.json:
        content = {
            "options": as_given(options),
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
