"""Who is slow: the ranks' times in a job's latest steps, and what communication computing hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bagua_autotune.model.job import Observation
from bagua_autotune.model.profile import Profile

MOST_RANKS = 256
# A rank is called slow if it holds the others up by so much of a step, and it is the same one in so
# many of the latest steps: who is slowest at random is nobody's fault.
SLOW_RATIO = 0.1
SLOW_SHARE = 0.5
# As many as the shortest trial has: of one or two steps one rank is always the slowest in half.
LEAST_STEPS = 5


@dataclass(frozen=True)
class RankTime:
    """Medians over the latest steps."""

    rank: int
    seconds: float
    compute_seconds: float | None


@dataclass(frozen=True)
class Spread:
    """How unequal the ranks are.

    Attributes:
        ratio: what the slowest rank computes longer than the middle one, in parts of a step.
        slowest_rank: that was slowest most often.
        slowest_share: of the steps, in which it was.
        steps: that were looked at.
    """

    ratio: float
    slowest_rank: int
    slowest_share: float
    steps: int

    @property
    def slow_rank(self) -> int | None:
        """The slowest rank if it is worth a warning: it costs much, and most of the time."""
        is_much = self.ratio > SLOW_RATIO and self.slowest_share >= SLOW_SHARE
        return self.slowest_rank if is_much and self.steps >= LEAST_STEPS else None


def step_seconds(observations: Sequence[Observation]) -> float | None:
    """Of the slowest rank; the median. None without steps."""
    slowest = [_slowest(observation.values) for observation in observations]
    return median(slowest) if slowest else None


def exposed_seconds(
    observations: Sequence[Observation], profiles: Sequence[Profile]
) -> float | None:
    """Communication that the slowest rank's computing does not hide, per step; the median.

    Args:
        observations: count where the ranks tell what they compute.
        profiles: of rank 0, for where they do not.
    """
    exposed = [
        max(0.0, _slowest(observation.values) - _slowest(observation.compute))
        for observation in _telling(observations)
        if observation.compute is not None
    ] or [max(0.0, found.step_seconds - max(found.ready_seconds)) for found in profiles]
    return median(exposed) if exposed else None


def spread(observations: Sequence[Observation]) -> Spread | None:
    """None where the ranks do not tell what they compute, or there is but one."""
    ratios: list[float] = []
    slowest: Counter[int] = Counter()
    for observation in _telling(observations):
        compute = [seconds or 0.0 for seconds in observation.compute or ()]
        if len(compute) < 2:
            return None
        longest = max(compute)
        ratios.append((longest - median(compute)) / _slowest(observation.values))
        slowest[compute.index(longest)] += 1
    if not ratios:
        return None
    rank, count = max(slowest.items(), key=lambda found: (found[1], -found[0]))
    return Spread(median(ratios), rank, count / len(ratios), len(ratios))


def rank_times(observations: Sequence[Observation]) -> list[RankTime]:
    """By rank; of more than MOST_RANKS those that compute longest and shortest."""
    if not observations:
        return []
    telling = _telling(observations)
    seconds = _medians([observation.values for observation in observations])
    compute = _medians([observation.compute or () for observation in telling])
    found = [
        RankTime(rank, own, compute[rank] if rank < len(compute) else None)
        for rank, own in enumerate(seconds)
        if own is not None
    ]
    if len(found) <= MOST_RANKS:
        return found
    ordered = sorted(found, key=lambda r: (r.compute_seconds or 0.0, r.seconds))
    ends = [*ordered[: MOST_RANKS // 2], *ordered[-MOST_RANKS // 2 :]]
    return sorted(ends, key=lambda r: r.rank)


def _telling(observations: Sequence[Observation]) -> list[Observation]:
    return [o for o in observations if o.compute and None not in o.compute]


def _slowest(values: Sequence[float | None]) -> float:
    return max(value for value in values if value is not None)


def _medians(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Over the rows, by column."""
    columns = zip(*rows, strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    return [median(values) if values else None for values in known]
