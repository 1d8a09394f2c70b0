"""What a tuning would likely gain, and what it could show, from a few steps of the default.

Apart from other views, as there is no job in the store: ``bagua-autotune check`` tunes nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bagua_autotune.costs import Layouts, Predictor, ShardedModel, fit_model, is_sharded, kinds_of
from bagua_autotune.measuring.confirmation import least_shown
from bagua_autotune.measuring.visits import Visited
from bagua_autotune.model.job import JobSpec, Trial
from bagua_autotune.model.received import PROFILE
from bagua_autotune.model.statistics import estimate
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_wire.configuration import Configuration

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prospect:
    """What a tuning is likely to come to.

    Attributes:
        speedup: of the best setting, from what the cost model expects to one standard deviation
            more: the default's steps alone do not tell what smaller or parallel messages cost.
            None: it has too little to go by.
        shown_speedup: the smallest that a confirmation would mostly show.
        step_spread: by what steps of one setting vary, as a share of one.
    """

    speedup: tuple[float, float] | None
    shown_speedup: float
    step_spread: float


def prospect(
    step_seconds: Sequence[float], job: Mapping[str, Any] | None, profiles: Sequence[Any]
) -> Prospect:
    """Return the prospect of a job.

    Args:
        step_seconds: of the slowest rank, at the default; one at least.
        job: how the ranks would register it; None: they did not tell.
        profiles: of steps at the default, as they would report them.
    """
    found = estimate([math.log(seconds) for seconds in step_seconds])
    visits = Visited([Trial(0, "search", Configuration(), "measured", found)]).visits
    try:
        speedup = _likely(job, profiles) if job and profiles else None
    except Exception as error:  # what a check measured is told without it
        logger.warning("what a tuning would likely gain is not known: %r", error)
        speedup = None
    return Prospect(speedup, math.exp(least_shown(visits)), visits.step_spread)


def _likely(job: Mapping[str, Any], told: Sequence[Any]) -> tuple[float, float] | None:
    spec = JobSpec.model_validate_json(json.dumps(job))
    layouts, default = Layouts(spec.tensors), Configuration(spec.default_configuration)
    profiled = [(default, PROFILE.validate_python(each)) for each in told]
    model: Predictor | None
    if is_sharded(profiled):
        model = ShardedModel(layouts, profiled)
    else:
        model = fit_model(layouts, kinds_of(spec.knobs, (default,)), profiled)
    if model is None:
        return None
    candidates = enumerate_candidates(spec.knobs, default, spec.tensors)
    costs, errors = model.predict(candidates), np.asarray(model.deviations(candidates))
    gains = costs[0] - costs
    together = np.sqrt(np.square(errors - errors[:, :1]).sum(axis=0))
    return math.exp(float(gains.max())), math.exp(float((gains + together).max()))
