"""What the search believes of the bucket sizes: the model's curve, with its band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import BUCKET_KNOB, Configuration, Value
from bagua_autotune.model.text import describe
from bagua_autotune.overview.best import best_trial
from bagua_autotune.search import Predicts
from bagua_autotune.search.candidates import EDGE_KNOBS, PARTITION_KNOB
from bagua_autotune.tuning.decision import baseline_estimate
from bagua_autotune.tuning.objective import OBJECTIVES
from bagua_autotune.tuning.rounds import of_round
from bagua_autotune.tuning.tuner import Tuner

# They refine a size; one curve for each of their values would hide what matters.
REFINEMENTS = ("channels", *EDGE_KNOBS, PARTITION_KNOB)


@dataclass(frozen=True)
class CurvePoint:
    """Seconds of a step, with the 95 % band."""

    bucket_bytes: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Line:
    """``values``: of all knobs but the bucket size."""

    label: str
    values: dict[str, Value]
    points: Sequence[CurvePoint]


@dataclass(frozen=True)
class Curve:
    """``trials``: how many closed ones of the round it rests on."""

    trials: int
    curves: Sequence[Line]


def make_curve(tuner: Tuner, job_id: str) -> Curve:
    """Fit the search's model to the round's trials. Takes a while.

    Empty where there is none: too few trials, a search method or a protocol without one.
    """
    job, trials = tuner.store.job(job_id), tuner.store.trials(job_id)
    current = of_round(trials, job.round)
    count = closed(current)
    objective = OBJECTIVES[job.protocol]
    baseline, best = baseline_estimate(job, current), best_trial(job, trials)
    if baseline is None or best is None or objective.seconds(baseline.center) is None:
        return Curve(count, [])
    found = tuner.searcher(job_id)
    if found is None:
        return Curve(count, [])
    searcher, problem = found
    if not isinstance(searcher, Predicts):
        return Curve(count, [])
    scale = objective.scale(baseline.center)
    lines = []
    for values in _lines(current, best.configuration):
        along = [c for c in problem.candidates if _without_size(c) == values]
        along.sort(key=lambda c: c.number(BUCKET_KNOB))
        points = []
        for configuration, cost in zip(along, searcher.predict(along), strict=False):
            seconds = [objective.seconds(at * scale) for at in (cost.center, cost.low, cost.high)]
            points.append(
                CurvePoint(configuration.number(BUCKET_KNOB), *(s or 0.0 for s in seconds))
            )
        if points:
            lines.append(Line(describe(values) or "default", dict(values), points))
    return Curve(count, lines)


def closed(trials: Sequence[Trial]) -> int:
    """How many of them."""
    return sum(not trial.is_open for trial in trials)


def _lines(trials: Sequence[Trial], best: Configuration) -> list[Configuration]:
    """The values that were tried of the knobs that make a line; refinements as in the best."""
    fixed = {knob: best[knob] for knob in REFINEMENTS if knob in best and knob != PARTITION_KNOB}
    if PARTITION_KNOB in best:
        fixed[PARTITION_KNOB] = ()
    tried = [trial.configuration for trial in trials if trial.estimate]
    return list(dict.fromkeys(_without_size(Configuration({**c, **fixed})) for c in tried))


def _without_size(configuration: Configuration) -> Configuration:
    return Configuration({k: v for k, v in configuration.items() if k != BUCKET_KNOB})
