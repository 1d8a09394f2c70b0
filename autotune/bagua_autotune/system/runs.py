"""The outcomes of the job's runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from bagua_autotune.model.knobs import Configuration, Value

# Two runs with the same settings are assumed to differ by so much until this is measured; the
# assumption weighs as much as so many measured differences.
USUAL_DEVIATION = 0.03
USUAL_COUNT = 2
# A value that never succeeded is not tried again after so many failures.
MOST_FAILURES = 2


Values = frozenset[tuple[str, Value]]
"""Some variables' values."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        score: for people: seconds of a step, or the number in the output; None: the run failed.
        cost: the logarithm of the time of a step, up to a constant; None like ``score``.
        standard_error: of ``cost``, as far as one run shows it; infinite: not known.
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
    """The measured costs of ``configuration``, in order."""
    own = (run.cost for run in runs if run.configuration == configuration)
    return [cost for cost in own if cost is not None]


def deviation(runs: Sequence[Run]) -> float:
    """The standard deviation of the cost between runs with the same settings: pooled over all
    settings with several runs, with a prior."""
    squares, count = USUAL_COUNT * USUAL_DEVIATION**2, USUAL_COUNT
    for configuration in {run.configuration for run in runs}:
        costs = costs_of(runs, configuration)
        if len(costs) > 1:
            mean = fmean(costs)
            squares += sum((cost - mean) ** 2 for cost in costs)
            count += len(costs) - 1
    return math.sqrt(squares / count)


def banned(runs: Iterable[Run]) -> set[Configuration]:
    """Return the configurations that failed."""
    return {run.configuration for run in runs if run.cost is None}


def left_out(runs: Sequence[Run]) -> list[Values]:
    """Values, and pairs of values, that always fail.

    Each failure is blamed on values that never succeeded: first on the one that most failures have
    in common, a single value before a pair, then the same for the remaining failures.
    """
    succeeded = {part for run in runs if run.cost is not None for part in _parts(run)}
    unexplained = [_parts(run) - succeeded for run in runs if run.cost is None]
    found: list[Values] = []
    while True:
        counts = Counter(part for failure in unexplained for part in failure)
        if not counts or max(counts.values()) < MOST_FAILURES:
            return found
        # Among equals the choice must not depend on hashes.
        ranked = sorted(counts, key=lambda part: (-counts[part], len(part), sorted(map(str, part))))
        found.append(ranked[0])
        unexplained = [failure for failure in unexplained if ranked[0] not in failure]


def _parts(run: Run) -> set[Values]:
    values = run.configuration.items()
    return {frozenset(part) for size in (1, 2) for part in combinations(values, size)}
