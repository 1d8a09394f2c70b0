"""The steps of a job: their times thinned out, where the ranks switched, and who is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from bagua_autotune.measuring.rounds import paces
from bagua_autotune.measuring.standing import course
from bagua_autotune.model.job import Observation
from bagua_autotune.model.view import View
from bagua_autotune.store.observations import SlowestTime
from bagua_autotune.views.reading import Reading
from bagua_wire.profile import Profile
from bagua_wire.words import describe

MOST_POINTS = 1000


class StepPoint(View):
    """``seconds`` of the slowest rank: of one step, or the median of several of one trial."""

    step: int
    trial: int
    seconds: float


class StepSeries(View):
    """A point stands for ``stride`` steps of a trial, or for what is left of them."""

    stride: int
    points: list[StepPoint]


class Switch(View):
    """The first observed step of a trial; without a trial: the last one of a tuning."""

    step: int
    trial: int | None
    words: str


class BestSoFar(View):
    """The step time of what was the best configuration after this trial, from all its trials."""

    trial: int
    seconds: float


def thin_out(times: Sequence[SlowestTime], most_points: int = MOST_POINTS) -> StepSeries:
    """Return at most so many points, but always one of each trial.

    Args:
        times: in the order of trials and steps.
    """
    trials = [list(members) for _, members in groupby(times, key=lambda time: time.trial)]
    stride = 1
    while sum(-(-len(members) // stride) for members in trials) > max(most_points, len(trials)):
        # The next one that can do, by what all steps together need.
        stride += 1
    points = [_point(part) for members in trials for part in _parts(members, stride)]
    return StepSeries(stride=stride, points=points)


def switches(reading: Reading) -> list[Switch]:
    """Return the switches in step order."""
    found = [
        Switch(
            step=reading.steps[trial.index].first,
            trial=trial.index,
            words=describe(trial.configuration),
        )
        for trial in reading.trials
        if trial.index in reading.steps
    ]
    found += [
        Switch(step=last, trial=None, words=": ".join(["tuned", *_kept(reading, number)]))
        for number in range(reading.job.round + 1)
        if (last := _end_of_round(reading, number)) is not None
    ]
    return sorted(found, key=lambda switch: switch.step)


def best_so_far(reading: Reading, incumbent_seconds: float | None) -> list[BestSoFar]:
    """Return what was best after each measured trial of the round that is shown; empty where costs
    are no times.

    Each configuration counts with all its trials until then, not with the luckiest. So this rises
    where the best one turns out to be slower when it is measured again, or fails.

    Args:
        incumbent_seconds: of the figures, which is what this ends with.
    """
    objective = reading.objective
    found = [
        BestSoFar(trial=trial.index, seconds=seconds)
        for trial, best in course(reading.shown)
        if trial.estimate
        and best
        and (seconds := objective.seconds(best.estimate.center)) is not None
    ]
    if found and incumbent_seconds is not None:
        found[-1] = BestSoFar(trial=found[-1].trial, seconds=incumbent_seconds)
    return found


def _parts(members: Sequence[SlowestTime], stride: int) -> list[Sequence[SlowestTime]]:
    return [members[start : start + stride] for start in range(0, len(members), stride)]


def _point(part: Sequence[SlowestTime]) -> StepPoint:
    middle = part[len(part) // 2]
    slowest = median(time.slowest for time in part)
    return StepPoint(step=middle.step, trial=middle.trial, seconds=slowest)


def _end_of_round(reading: Reading, number: int) -> int | None:
    """The last step that was observed in a round that is over."""
    if number == reading.job.round and reading.job.phase != "finished":
        return None
    observed = [
        reading.steps[trial.index].last
        for trial in reading.trials
        if trial.round == number and trial.index in reading.steps
    ]
    return max(observed, default=None)


def _kept(reading: Reading, number: int) -> list[str]:
    """Return what the latest round ended with; nothing for earlier rounds, whose result is not
    known any more.
    """
    result = reading.job.result
    return [describe(result.configuration)] if result and number == reading.job.round else []


MOST_RANKS = 256
# A rank is called slow if it holds the others up by so much of a step, and it is the same one in so
# many of the latest steps.
SLOW_RATIO = 0.1
SLOW_SHARE = 0.5
# Some rank is always the slowest one, of two ranks in at least half of the steps. So it must be the
# same one more often than happens to ranks that are alike, but for one time in so many.
BY_CHANCE = 0.05


class RankTime(View):
    """A rank's times: medians over the latest steps."""

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
        ranks: that there are.
    """

    ratio: float
    slowest_rank: int
    slowest_share: float
    steps: int
    ranks: int

    @property
    def slow_rank(self) -> int | None:
        """The slowest rank if it is worth a warning: it costs much, most of the time, and more
        often than chance explains."""
        is_much = self.ratio > SLOW_RATIO and self.slowest_share >= SLOW_SHARE
        return self.slowest_rank if is_much and self._by_chance < BY_CHANCE else None

    @property
    def _by_chance(self) -> float:
        """Return how probable it is at most that one of so many ranks that are alike is the slowest
        in that many steps (the binomial distribution, for any of the ranks).
        """
        from scipy.special import bdtrc  # here: takes long to import

        fewer = round(self.slowest_share * self.steps) - 1
        return self.ranks * float(bdtrc(fewer, self.steps, 1 / self.ranks))


def step_seconds(observations: Sequence[Observation]) -> float | None:
    """The median of the slowest rank's step times; None without steps."""
    slowest = [_slowest(observation.values) for observation in observations]
    return median(slowest) if slowest else None


def exposed_seconds(
    observations: Sequence[Observation], profiles: Sequence[Profile]
) -> float | None:
    """Communication that the slowest rank's computing does not hide, per step; the median. None
    where that is not known.

    Args:
        observations: count where the ranks tell what they compute.
        profiles: of rank 0, for where they do not.
    """
    told = paces(observations) or [(p.step_seconds, max(p.ready_seconds)) for p in profiles]
    exposed = [max(0.0, seconds - computing) for seconds, computing in told]
    return median(exposed) if exposed else None


def rank_spread(observations: Sequence[Observation]) -> Spread | None:
    """Return how unequal the ranks are; None where they do not tell what they compute, or there is
    but one.
    """
    ratios: list[float] = []
    slowest: Counter[int] = Counter()
    ranks = 0
    for observation in _telling(observations):
        compute = [seconds or 0.0 for seconds in observation.compute or ()]
        ranks = len(compute)
        if ranks < 2:
            return None
        longest = max(compute)
        ratios.append((longest - median(compute)) / _slowest(observation.values))
        slowest[compute.index(longest)] += 1
    if not ratios:
        return None
    rank, count = max(slowest.items(), key=lambda found: (found[1], -found[0]))
    return Spread(median(ratios), rank, count / len(ratios), len(ratios), ranks)


def rank_times(observations: Sequence[Observation]) -> list[RankTime]:
    """Return times by rank; of more than MOST_RANKS only those that compute longest and
    shortest.
    """
    if not observations:
        return []
    telling = _telling(observations)
    seconds = _medians([observation.values for observation in observations])
    compute = _medians([observation.compute or () for observation in telling])
    found = [
        RankTime(
            rank=rank,
            seconds=own,
            compute_seconds=compute[rank] if rank < len(compute) else None,
        )
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
    """Return each column's median over the rows."""
    columns = zip(*rows, strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    return [median(values) if values else None for values in known]
