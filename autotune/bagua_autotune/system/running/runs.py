"""The outcomes of the job's runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagua_autotune.model.statistics import spread_of_repeats
from bagua_wire.configuration import Configuration

# Two runs with the same settings are assumed to differ by so much until this is measured.
USUAL_DEVIATION = 0.03

BASELINE, SEARCH, CONFIRM = "baseline", "search", "confirm"
"""What a run is made for."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        score: for people: seconds of a step, or the number in the output; None: the run failed.
        cost: the logarithm of the time of a step, up to a constant; None like ``score``.
        standard_error: of ``cost``, as far as one run shows it; infinite: not known.
        failure: why there is no score.
        is_out_of_memory: it failed because there was no memory left.
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
    is_out_of_memory: bool = False


@dataclass(frozen=True)
class Run:
    """One run of the job, the ``number``-th from 1."""

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
    """The standard deviation of the cost between runs with the same settings."""
    repeats = [costs_of(runs, tried) for tried in dict.fromkeys(run.configuration for run in runs)]
    return spread_of_repeats([costs for costs in repeats if costs], USUAL_DEVIATION**2)[0]


def banned(runs: Iterable[Run]) -> set[Configuration]:
    """Return the configurations that failed."""
    return {run.configuration for run in runs if run.cost is None}
