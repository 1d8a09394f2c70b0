"""How much of a job's gain each knob explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from bagua_autotune.deciding.decision import told_searcher
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.view import View
from bagua_autotune.search import Predicts, Problem
from bagua_autotune.search.searcher import Factory
from bagua_wire.configuration import Configuration
from bagua_wire.knobs import ALGORITHM_KNOB

# So many knobs have 256 mixtures of two configurations.
MOST_CHANGED = 8
# A share that may be off by more than a quarter of the gain says too little.
LARGEST_ERROR = 0.25

NO_GAIN = "The default is the fastest so far, so there is no gain to explain."
NO_MODEL = "This search method predicts no step times, so the knobs cannot be told apart."
TOO_FEW = (
    "{changed} knobs differ from the default. To tell them apart takes at least {needed} measured "
    "configurations; there are {measured}."
)
TOO_MANY = f"More than {MOST_CHANGED} knobs differ from the default; their shares are not computed."
ALGORITHM = (
    "The algorithm itself differs from the default, and not every knob means the same under both."
)
FAILED = (
    "Some of the knobs failed when they were tried alone, so the gain cannot be divided among them."
)
NOT_CLEAR = "The trials do not show clearly which knob the gain comes from."

Knobs = frozenset[str]


class KnobShare(View):
    """One knob's part of the gain: 0.8 is 80 %, and all knobs together make 1.

    ``share`` is negative where the change of this knob alone costs time. ``low`` and ``high``: the
    widest 95 % interval that the model's bands allow.
    """

    knob: str
    share: float
    low: float
    high: float


class Importance(View):
    """What made the best configuration faster than the default.

    Attributes:
        shares: of the knobs whose values differ from the default's, the largest first.
        unknown: why there are no shares, in a sentence; empty if there are some.
    """

    shares: Sequence[KnobShare] = ()
    unknown: str = ""


def make_importance(
    round_: Round, best: Configuration, problem: Problem, make_searcher: Factory
) -> Importance:
    """Divide the gain of the best configuration over the default among the knobs that differ.

    Each knob gets its Shapley value (Shapley, "A value for n-person games", 1953), in the form that
    compares a point with the default (Sundararajan and Najmi, "The many Shapley values for model
    explanation", 2020: baseline Shapley): by how much the expected cost falls when this knob
    changes from the default's value to the best's, averaged over all orders in which the knobs can
    change one after the other. Most mixtures of the two configurations were never measured, so the
    costs are those that the search's model expects. A cost is the logarithm of the step time, so
    the shares divide the logarithm of the speed-up.

    Args:
        round_: its default is measured.
        best: the best configuration of the round.
        problem: of the round.
        make_searcher: builds the job's search method.
    """
    job = round_.job
    changed = [knob for knob in job.space if best[knob] != job.baseline[knob]]
    if not changed:
        return Importance(unknown=NO_GAIN)
    if len(changed) == 1:
        return Importance(shares=[KnobShare(knob=changed[0], share=1.0, low=1.0, high=1.0)])
    measured = {trial.configuration for trial in round_.trials if trial.estimate}
    unknown = _obstacle(changed, len(measured))
    if unknown:
        return Importance(unknown=unknown)
    mixtures = _mixtures(job.baseline, best, changed)
    # A mixture need not be a candidate: one that does the same may stand for it.
    candidates = tuple(dict.fromkeys([*problem.candidates, *mixtures.values()]))
    widened = replace(problem, candidates=candidates)
    found = told_searcher(round_, widened, make_searcher)
    searcher, allowed = found or (None, widened)
    if not isinstance(searcher, Predicts):
        return Importance(unknown=NO_MODEL)
    if not set(mixtures.values()) <= set(allowed.candidates):
        return Importance(unknown=FAILED)
    costs = searcher.predict(list(mixtures.values()))
    shares = shapley_shares(changed, dict(zip(mixtures, costs, strict=True)))
    return Importance(shares=shares) if shares else Importance(unknown=NOT_CLEAR)


def _obstacle(changed: Sequence[str], measured: int) -> str:
    """Why the gain cannot be divided among these knobs; empty if it can.

    With fewer configurations than knobs and one more, several divisions fit the trials equally
    well.
    """
    if ALGORITHM_KNOB in changed:
        return ALGORITHM
    if len(changed) > MOST_CHANGED:
        return TOO_MANY
    needed = len(changed) + 1
    if measured < needed:
        return TOO_FEW.format(changed=len(changed), needed=needed, measured=measured)
    return ""


def _mixtures(
    default: Configuration, best: Configuration, changed: Sequence[str]
) -> dict[Knobs, Configuration]:
    """Return configurations by the knobs that have the best's values; the others have the
    default's.
    """
    chosen = [
        frozenset(knobs)
        for count in range(len(changed) + 1)
        for knobs in combinations(changed, count)
    ]
    return {
        knobs: Configuration({**default, **{knob: best[knob] for knob in knobs}})
        for knobs in chosen
    }


def shapley_shares(changed: Sequence[str], costs: Mapping[Knobs, Interval]) -> list[KnobShare]:
    """Shapley values in parts of the whole gain, the largest first; none where they are not clear.

    The model tells how sure each cost is by itself, not how their errors go together. A weighted
    sum is off by no more than the weighted sum of the errors, however they go together; the
    intervals are that wide.

    Args:
        costs: of every mixture, by the knobs that have the best's values.
    """
    whole = costs[frozenset()].center - costs[frozenset(changed)].center
    if whole <= 0:
        return []
    shares = []
    for knob in changed:
        value = error = 0.0
        for knobs, weight in _weights(knob, len(changed), costs).items():
            cost = costs[knobs]
            value += weight * cost.center
            error += abs(weight) * (cost.high - cost.low) / 2
        share, error = value / whole, error / whole
        if error > LARGEST_ERROR:
            return []
        shares.append(KnobShare(knob=knob, share=share, low=share - error, high=share + error))
    return sorted(shares, key=lambda each: -each.share)


def _weights(knob: str, count: int, mixtures: Mapping[Knobs, Interval]) -> dict[Knobs, float]:
    """Return the weight of each mixture's cost in the value of one of so many knobs."""
    found: dict[Knobs, float] = {}
    for knobs in mixtures:
        if knob not in knobs:
            weight = 1 / (count * math.comb(count - 1, len(knobs)))
            found[knobs] = weight
            found[knobs | {knob}] = -weight
    return found
