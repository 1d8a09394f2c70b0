"""What a job's search took, round by round."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_autotune.overview.reading import Reading
from bagua_autotune.tuning.bill import Bill, bill
from bagua_autotune.tuning.rounds import of_round, search_seconds
from bagua_autotune.tuning.standing import standing


@dataclass(frozen=True)
class Spent:
    """``seconds``: from the first trial to the end of the last; ``bill``: its steps, and what they
    lost against the baseline."""

    seconds: float
    bill: Bill


def spent(reading: Reading, number: int) -> Spent:
    """Of one round, as far as it has come."""
    job, trials = reading.job, of_round(reading.trials, number)
    baseline = standing(trials, job.baseline)
    cost = bill(
        trials,
        reading.steps,
        reading.switch_seconds,
        baseline.center if baseline else None,
        reading.objective,
    )
    return Spent(search_seconds(job, trials), cost)
