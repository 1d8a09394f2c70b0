"""What became of runs of the job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from bagua_autotune.model.knobs import Configuration, Value

# Two runs of the same settings are taken to differ by so much until some have shown it; this
# guess counts as so many differences.
USUAL_DEVIATION = 0.03
USUAL_COUNT = 2
# So many failures of a value that never succeeded, and it is tried no more.
MOST_FAILURES = 2


Values = frozenset[tuple[str, Value]]
"""Some variables' values."""


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        score: what people read: seconds of a step, or the number in the output; None: the run
            failed.
        cost: the logarithm of what a step costs, up to a constant; None with ``score``.
        standard_error: of ``cost``, as far as it shows in one run; infinite: not known.
        failure: why there is no score.
        last_lines: of the output.
        seconds: how long the run took.
        exit_code: of a command that failed by itself; None: it did not.
    """

    score: float | None = None
    cost: float | None = None
    standard_error: float = math.inf
    failure: str = ""
    last_lines: tuple[str, ...] = ()
    seconds: float = 0.0
    exit_code: int | None = None


@dataclass(frozen=True)
class Run:
    """One run of the job, the ``number``-th from 1. Its purpose: baseline, search or confirm."""

    number: int
    purpose: str
    configuration: Configuration
    outcome: Outcome

    @property
    def cost(self) -> float | None:
        return self.outcome.cost


def costs_of(runs: Iterable[Run], configuration: Configuration) -> list[float]:
    """What was measured of ``configuration``, in its order."""
    own = (run.cost for run in runs if run.configuration == configuration)
    return [cost for cost in own if cost is not None]


def deviation(runs: Sequence[Run]) -> float:
    """By how much the cost of one run differs from the next with the same settings: pooled over
    those that were run more than once, with the usual as a prior."""
    squares, count = USUAL_COUNT * USUAL_DEVIATION**2, USUAL_COUNT
    for configuration in {run.configuration for run in runs}:
        costs = costs_of(runs, configuration)
        if len(costs) > 1:
            mean = fmean(costs)
            squares += sum((cost - mean) ** 2 for cost in costs)
            count += len(costs) - 1
    return math.sqrt(squares / count)


def banned(runs: Iterable[Run]) -> set[Configuration]:
    """What has failed."""
    return {run.configuration for run in runs if run.cost is None}


def left_out(runs: Sequence[Run]) -> list[Values]:
    """Values, and pairs of values, that fail whatever the others say.

    A failed run has a value of every variable. To blame is what never succeeded: what most failures
    have in common, a single value before a pair; then of the failures that are left the next.
    """
    succeeded = {part for run in runs if run.cost is not None for part in _parts(run)}
    unexplained = [_parts(run) - succeeded for run in runs if run.cost is None]
    found: list[Values] = []
    while True:
        counts = Counter(part for failure in unexplained for part in failure)
        if not counts or max(counts.values()) < MOST_FAILURES:
            return found
        # Which one is blamed among equals must not depend on hashes.
        ranked = sorted(counts, key=lambda part: (-counts[part], len(part), sorted(map(str, part))))
        found.append(ranked[0])
        unexplained = [failure for failure in unexplained if ranked[0] not in failure]


def _parts(run: Run) -> set[Values]:
    values = run.configuration.items()
    return {frozenset(part) for size in (1, 2) for part in combinations(values, size)}
