"""Step times over the whole job, thinned out, and where the ranks switched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from bagua_autotune.model.text import describe
from bagua_autotune.overview.reading import Reading
from bagua_autotune.store.digests import StepTime
from bagua_autotune.tuning.rounds import of_round
from bagua_autotune.tuning.standing import course

MOST_POINTS = 1000


@dataclass(frozen=True)
class Point:
    """``seconds`` of the slowest rank: of one step, or the median of several of one trial."""

    step: int
    trial: int
    seconds: float


@dataclass(frozen=True)
class Series:
    """A point stands for ``stride`` steps of a trial, or for what is left of them."""

    stride: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Switch:
    """The first observed step of a trial; without a trial: the last one of a tuning."""

    step: int
    trial: int | None
    words: str


@dataclass(frozen=True)
class Best:
    """The step time of what was the best configuration up to a trial of the round."""

    trial: int
    seconds: float


def thin_out(times: Sequence[StepTime], most_points: int = MOST_POINTS) -> Series:
    """At most so many points, but always one of each trial.

    Args:
        times: in the order of trials and steps.
    """
    trials = [list(members) for _, members in groupby(times, key=lambda time: time.trial)]
    stride = 1
    while sum(-(-len(members) // stride) for members in trials) > max(most_points, len(trials)):
        # The next one that can do, by what all steps together need.
        stride += 1
    points = [_point(part) for members in trials for part in _parts(members, stride)]
    return Series(stride, points)


def switches(reading: Reading) -> list[Switch]:
    """In step order."""
    found = [
        Switch(reading.steps[trial.index].first, trial.index, describe(trial.configuration))
        for trial in reading.trials
        if trial.index in reading.steps
    ]
    found += [
        Switch(
            last, None, f"tuned: {_kept(reading, number)}" if _kept(reading, number) else "tuned"
        )
        for number in range(reading.job.round + 1)
        if (last := _end_of_round(reading, number)) is not None
    ]
    return sorted(found, key=lambda switch: switch.step)


def best_so_far(reading: Reading) -> list[Best]:
    """After each measured trial of the round that is shown; empty where costs are no times.

    Each configuration counts with all its trials until then, not with the luckiest. So this rises
    where the best one turns out to be slower when it is measured again (or fails), and it ends with
    the incumbent's step time of the figures, or else that of what was not confirmed.
    """
    objective = reading.objective
    return [
        Best(trial.index, seconds)
        for trial, leader in course(reading.job, reading.shown)
        if trial.estimate
        and leader
        and (seconds := objective.seconds(leader.estimate.center)) is not None
    ]


def _parts(members: Sequence[StepTime], stride: int) -> list[Sequence[StepTime]]:
    return [members[start : start + stride] for start in range(0, len(members), stride)]


def _point(part: Sequence[StepTime]) -> Point:
    middle = part[len(part) // 2]
    return Point(middle.step, middle.trial, median(time.slowest for time in part))


def _end_of_round(reading: Reading, number: int) -> int | None:
    """The last step that was observed in a round that is over."""
    if number == reading.job.round and reading.job.phase != "finished":
        return None
    observed = [
        reading.steps[trial.index].last
        for trial in of_round(reading.trials, number)
        if trial.index in reading.steps
    ]
    return max(observed, default=None)


def _kept(reading: Reading, number: int) -> str:
    """What the latest round ended with; of those before it is not known any more."""
    result = reading.job.result
    return describe(result.configuration) if result and number == reading.job.round else ""
