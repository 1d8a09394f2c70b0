"""What came of runs, and how fast each was: by its steps, or by a number in its output."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bagua_autotune.model.statistics import PRIOR_REPEATS, Interval, deviation_of_repeats, estimate
from bagua_autotune.model.text import describe_seconds
from bagua_wire.configuration import Configuration

# Two runs with the same settings are assumed to differ by so much until this is measured.
USUAL_DEVIATION = 0.03
# Of a lead that is looked at again and again until it is clear: that many looks are paid for by
# asking more of each (Pocock, "Group sequential methods in the design and analysis of clinical
# trials", Biometrika 64, 1977: 0.984 to 0.992 for 2 to 6 looks).
CONFIDENCE_OF_LOOKS = 0.99
# A guess of what runs differ by besides: the same settings minutes apart differed by 1 to 10 %.
USUAL_BETWEEN = 0.02

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
    repeats = (costs_of(runs, tried) for tried in dict.fromkeys(run.configuration for run in runs))
    return deviation_of_repeats(repeats, USUAL_DEVIATION)


def lead(costs: Sequence[float], is_own: Sequence[bool], noise: float) -> Interval:
    """How far the costs of the user's own settings lie above those of others that took turns with
    them.

    A machine that gets steadily slower or faster is part of the fit: least squares of the costs on
    their side and their place. What they differ by beyond that is their variance; few do not show
    it well, so a guess counts as some more (the usual scaled inverse chi-squared prior: Gelman et
    al., "Bayesian Data Analysis", section 2.6), and it is never less than ``noise``.

    Args:
        costs: in their order, which should be A B B A; at least two of each side.
        noise: of a cost, by all runs.
    """
    import numpy as np  # here: they take long to import
    from scipy.special import stdtrit

    places, sides = np.arange(len(costs)), np.array(is_own, float)
    design = np.stack([np.ones(len(costs)), places - places.mean(), sides], axis=1)
    # Differences from one of them: costs of any size keep their digits.
    centers = np.array(costs) - costs[0]
    solution = np.linalg.lstsq(design, centers, rcond=None)[0]
    # What only the side explains: little of it is a large error.
    others = design[:, :2]
    alone = sides - others @ np.linalg.lstsq(others, sides, rcond=None)[0]
    squares = float(np.sum(np.square(centers - design @ solution)))
    degrees = max(0, len(costs) - design.shape[1]) + PRIOR_REPEATS
    guess = noise**2 + USUAL_BETWEEN**2
    spread = max(math.sqrt((squares + PRIOR_REPEATS * guess) / degrees), noise)
    quantile = float(stdtrit(degrees, CONFIDENCE_OF_LOOKS))
    center, reach = float(solution[2]), quantile * spread / float(np.linalg.norm(alone))
    return Interval(center, center - reach, center + reach)


def banned(runs: Iterable[Run]) -> set[Configuration]:
    """Return the configurations that failed."""
    return {run.configuration for run in runs if run.cost is None}


# How the speed of a run is found: by its steps, or by a number in its output.

PROBE = "BAGUA_AUTOTUNE_PROBE"
STEPS_FILE, OUTPUT_FILE = "steps.json", "output"
FEWEST_STEPS = 3


class Measure(Protocol):
    """How the speed of a run is found.

    Attributes:
        facts: of the last run: its backend, and whether it uses our client.
    """

    facts: Mapping[str, Any]

    def environment(self, folder: Path) -> dict[str, str]:
        """The variables for a run, which make it write into ``folder``."""

    def result(self, folder: Path, is_over: bool) -> Outcome | None:
        """The result of a run; None: it must go on. ``is_over``: it has ended by itself."""

    def describe(self, score: float) -> str:
        """A score in words."""


class StepTimes:
    """The mean time of ``steps`` optimizer steps, without pauses, whatever the script prints."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.facts: Mapping[str, Any] = {}

    def environment(self, folder: Path) -> dict[str, str]:
        """See Measure."""
        return _timing(folder, self._steps)

    def result(self, folder: Path, is_over: bool) -> Outcome | None:
        """See Measure."""
        self.facts = read_document(folder / STEPS_FILE)
        if not is_over and not self.facts.get("is_over"):
            return None
        seconds = [s for s in self.facts.get("step_seconds", []) if s > 0]
        if len(seconds) >= FEWEST_STEPS:
            found = estimate(seconds)
            error = found.standard_error / found.center
            return Outcome(found.center, math.log(found.center), error)
        if not self.facts:
            return Outcome(
                failure="no step of a PyTorch optimizer was seen (--metric takes a number from "
                "the output instead)"
            )
        return Outcome(failure="ended after too few steps to measure")

    def describe(self, score: float) -> str:
        """See Measure."""
        return f"{describe_seconds(score)} a step"


@dataclass
class Metric:
    """A number in the output.

    Args:
        pattern: with one group, which finds the number.
        higher_is_better: as of images per second; else as of seconds.
        takes_last: use the last number, not the median of all.
        most_matches: the run is ended after so many numbers; None: it ends by itself.
    """

    pattern: re.Pattern[str]
    higher_is_better: bool = True
    takes_last: bool = False
    most_matches: int | None = None

    def __post_init__(self) -> None:
        if self.pattern.groups != 1:
            raise ValueError(
                f"{self.pattern.pattern!r} has {self.pattern.groups} groups; it needs one, in "
                "parentheses, around the number"
            )
        self.facts: Mapping[str, Any] = {}

    def environment(self, folder: Path) -> dict[str, str]:
        """See Measure."""
        # Only the training's backend is needed, not its steps.
        return _timing(folder, 0)

    def result(self, folder: Path, is_over: bool) -> Outcome | None:
        """See Measure."""
        if not is_over and self.most_matches is None:
            return None
        lines = output_lines(folder)
        found = [match.group(1) for line in lines for match in self.pattern.finditer(line)]
        if not is_over and len(found) < (self.most_matches or 1):
            return None
        self.facts = read_document(folder / STEPS_FILE)
        numbers = [_number(text) for text in found[: self.most_matches]]
        if not numbers:
            return Outcome(failure=f"printed nothing that {self.pattern.pattern!r} finds")
        if not all(0 < number < math.inf for number in numbers):
            bad = next(text for text in found if not 0 < _number(text) < math.inf)
            return Outcome(failure=f"printed {bad!r}, which is not a number above 0")
        score = numbers[-1] if self.takes_last else median(numbers)
        return Outcome(score, -math.log(score) if self.higher_is_better else math.log(score))

    def describe(self, score: float) -> str:
        """See Measure."""
        return f"{score:.5g}"


def output_lines(folder: Path) -> list[str]:
    """The output of a run so far; each state of a progress bar counts as a line."""
    return re.split(r"[\r\n]+", (folder / OUTPUT_FILE).read_bytes().decode(errors="replace"))


def _timing(folder: Path, steps: int) -> dict[str, str]:
    """Variables that make every Python of the job time its steps: see bagua_client.startup."""
    client = importlib.util.find_spec("bagua_client")
    if client is None or not client.submodule_search_locations:
        return {}
    paths = [str(Path(client.submodule_search_locations[0]) / "startup")]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return {PROBE: f"{folder / STEPS_FILE}:{steps}", "PYTHONPATH": os.pathsep.join(paths)}


def read_document(path: Path) -> Mapping[str, Any]:
    """What a run has written; empty: nothing yet."""
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except (ValueError, AttributeError):
        return math.nan
