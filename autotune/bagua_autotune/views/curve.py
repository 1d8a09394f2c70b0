"""What the search believes: its curve over the bucket size, and what each knob is worth."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.deciding.decision import told_searcher
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.objective import Objective
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import best_trial
from bagua_autotune.model.job import RUNS, Job, Trial
from bagua_autotune.model.knobs import ConfigurationField
from bagua_autotune.model.view import View
from bagua_autotune.search import Predicts, Problem
from bagua_autotune.search.searcher import Factory
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.views.importance import Importance, make_importance
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import BUCKET_KNOB, EDGE_KNOBS, PARTITION_KNOB
from bagua_wire.words import describe_part

logger = logging.getLogger(__name__)

# They refine a size; one curve for each of their values would hide what matters.
REFINEMENTS = ("channels", *EDGE_KNOBS, PARTITION_KNOB)


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
