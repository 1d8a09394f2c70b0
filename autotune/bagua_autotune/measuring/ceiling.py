"""The most that a job can gain: the communication that computing does not hide.

A step that waited for no communication would take as long as its slowest rank computes. So the
default's own steps say how much faster anything can be. Each is compared with what was computed in
the same step: a machine that becomes slower or faster changes both.

What seems to gain more was lucky, or computing itself takes less time with other messages. That the
default's steps cannot tell: only trials can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bagua_autotune.measuring.objective import OBJECTIVES
from bagua_autotune.model.job import Job, Observation
from bagua_autotune.model.knobs import Categorical, algorithm_of
from bagua_autotune.model.statistics import estimate
from bagua_wire.knobs import ALGORITHM_KNOB, KNOBS

# The last ones of the default's first trial: those before are its warm-up.
LATEST_STEPS = 20
FEWEST_STEPS = 3
# No step is taken to compute for less than this part of it.
LEAST_COMPUTING = 1e-3


@dataclass(frozen=True)
class Ceiling:
    """What the default's steps say.

    Attributes:
        seconds: of a step; the median.
        exposed_seconds: of it, that no computing hides; the median.
        gain: the most that can be gained, as a logarithm; the upper end of its 95 % interval.
    """

    seconds: float
    exposed_seconds: float
    gain: float

    @property
    def speedup(self) -> float:
        """How many times as fast as the default the job can be at most."""
        return math.exp(self.gain)


def paces(observations: Sequence[Observation]) -> list[tuple[float, float]]:
    """The seconds of the slowest rank, and those that the slowest rank computes; of each step in
    which all ranks told them."""
    told = ((each.values, each.compute or ()) for each in observations)
    return [
        (max(filter(None, values), default=0.0), max(filter(None, computed), default=0.0))
        for values, computed in told
        if computed and None not in computed
    ]


def ceiling(job: Job, observations: Sequence[Observation]) -> Ceiling | None:
    """Return the job's ceiling; None where it is not known, of ranks that do not wait for each
    other, and where what they compute is tuned.

    Args:
        observations: of the default.
    """
    return None if _may_compute_less(job) else exposed(job, observations)


def exposed(job: Job, observations: Sequence[Observation]) -> Ceiling | None:
    """Return what can be gained over one configuration by others that compute as much as it; None
    where that is not known.

    Args:
        observations: of the configuration.
    """
    told = paces(observations)
    if len(told) < FEWEST_STEPS or OBJECTIVES[job.protocol].seconds(0.0) is None:
        return None
    if _may_part(job):
        return None
    gains = [
        math.log(seconds / min(max(computing, LEAST_COMPUTING * seconds), seconds))
        for seconds, computing in told
    ]
    return Ceiling(
        seconds=median(seconds for seconds, _ in told),
        exposed_seconds=median(max(0.0, seconds - computing) for seconds, computing in told),
        gain=estimate(gains).high,
    )


def _may_compute_less(job: Job) -> bool:
    """Whether a knob says what the ranks compute, which the default's steps say nothing of."""
    return any(knob in KNOBS and KNOBS[knob].computes for knob in job.space)


def _may_part(job: Job) -> bool:
    """Whether the ranks may run without waiting for each other, which no slowest one bounds."""
    domain = job.space.get(ALGORITHM_KNOB)
    names = domain.values if isinstance(domain, Categorical) else ()
    choices = [job.baseline, *({ALGORITHM_KNOB: name} for name in names)]
    return any(algorithm_of(choice).when == "apart" for choice in choices)
