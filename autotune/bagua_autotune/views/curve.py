"""What the search believes: its curve over the bucket size, and what each knob is worth."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.deciding.decision import told_searcher
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.against_default import Objective
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import best_trial
from bagua_autotune.model.job import RUNS, Job, Trial
from bagua_autotune.model.knobs import ConfigurationField
from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.view import View
from bagua_autotune.search import Predicts, Problem
from bagua_autotune.search.searcher import Factory
from bagua_autotune.store.errors import UnknownJob
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import ALGORITHM_KNOB, BUCKET_KNOB, EDGE_KNOBS, PARTITION_KNOB
from bagua_wire.words import describe_part

logger = logging.getLogger(__name__)

# They refine a size; one curve for each of their values would hide what matters.
REFINEMENTS = ("channels", *EDGE_KNOBS, PARTITION_KNOB)
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


class CurvePoint(View):
    """Seconds of a step, with the 95 % band."""

    bucket_bytes: int
    seconds: float
    low: float
    high: float


class CurveLine(View):
    """``values``: of all knobs but the bucket size."""

    label: str
    values: ConfigurationField
    points: list[CurvePoint]


class Curve(View):
    """What the search believes.

    Attributes:
        trials: how many closed ones of the round it rests on.
        curves: empty where it has no opinion (yet).
        expected_gain: by how much the next trial is expected to lower the best step time, as a
            share of it (0.004 is 0.4 %); None where that is not known.
        importance: how much of the gain so far each knob explains.
    """

    trials: int
    curves: Sequence[CurveLine] = ()
    expected_gain: float | None = None
    importance: Importance = Importance()


def make_curve(
    job: Job, trials: Sequence[Trial], knowledge: Knowledge, make_searcher: Factory
) -> Curve:
    """Fit the search's model to the trials of the round that is shown. Takes a while.

    There is none with too few trials, with a search method or a protocol that has none, of a job
    without buckets, and of a search with whole runs, which the service does not make.

    Args:
        trials: of all rounds.
        make_searcher: builds the job's search method.
    """
    round_ = Round.shown(job, trials)
    best, baseline = best_trial(round_), round_.defaults.first
    known = Curve(trials=closed(round_.trials))
    objective = round_.objective
    if baseline is None or best is None or job.protocol in RUNS:
        return known
    scale, chosen = objective.scale(baseline.center), best.configuration
    has_seconds = objective.seconds(baseline.center) is not None
    try:
        problem = knowledge.problem(round_)
        importance = make_importance(round_, chosen, problem, make_searcher)
        known = known.model_copy(update={"importance": importance})
        told = told_searcher(round_, problem, make_searcher)
        has_curve = has_seconds and BUCKET_KNOB in job.space
        if told is None or not has_curve or not isinstance(told[0], Predicts):
            return known
        searcher, problem = told[0], told[1]
        gain = searcher.expected_gain()
        lines = [
            CurveLine(label=describe_part(values) or "default", values=values, points=points)
            for values in _tried_values(round_.trials, chosen)
            if (points := _points(searcher, problem, values, objective, scale))
        ]
    except (SQLAlchemyError, UnknownJob):
        raise
    except Exception:
        # The search itself goes on without its model then, see next_step.
        logger.exception("job %s: there is no curve to show", job.id)
        return known
    gain_known = gain if math.isfinite(gain) else None
    return known.model_copy(update={"curves": lines, "expected_gain": gain_known})


def _points(
    searcher: Predicts,
    problem: Problem,
    values: Configuration,
    objective: Objective,
    scale: float,
) -> list[CurvePoint]:
    """The curve's points of the candidates that have these values, by size; empty if nothing can be
    said of them."""
    along = [candidate for candidate in problem.candidates if _without_size(candidate) == values]
    along.sort(key=_size)
    costs = searcher.predict(along)

    def seconds(cost: float) -> float:
        return objective.seconds(cost * scale) or 0.0

    return [
        CurvePoint(
            bucket_bytes=_size(candidate),
            seconds=seconds(cost.center),
            low=seconds(cost.low),
            high=seconds(cost.high),
        )
        for candidate, cost in zip(along, costs, strict=bool(costs))
    ]


def closed(trials: Sequence[Trial]) -> int:
    """Count the trials that are not open."""
    return sum(not trial.is_open for trial in trials)


def _tried_values(trials: Sequence[Trial], best: Configuration) -> list[Configuration]:
    """The tried values of the knobs that make a line; refinements are as in the best, and no
    explicit buckets."""
    refined = {knob: best[knob] for knob in REFINEMENTS if knob in best}
    if PARTITION_KNOB in refined:
        refined[PARTITION_KNOB] = ()
    tried = [trial.configuration for trial in trials if trial.estimate]
    return list(dict.fromkeys(_without_size({**found, **refined}) for found in tried))


def _without_size(configuration: Mapping[str, Value]) -> Configuration:
    return Configuration({k: v for k, v in configuration.items() if k != BUCKET_KNOB})


def _size(configuration: Configuration) -> int:
    return configuration.number(BUCKET_KNOB)


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
