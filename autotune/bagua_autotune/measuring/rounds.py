"""The rounds of a job, which is tuned again after a lasting change of its step times; and the most
that it can gain in one: the communication that computing does not hide.

A step that waited for no communication would take as long as its slowest rank computes. So the
default's own steps say how much faster anything can be. Each is compared with what was computed in
the same step: a machine that becomes slower or faster changes both.

What seems to gain more was lucky, or computing itself takes less time with other messages. That the
default's steps cannot tell: only trials can.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

from bagua_autotune.measuring.against_default import OBJECTIVES, Defaults, Objective
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import CUT_SHORT, Job, Limits, Observation, Trial
from bagua_autotune.model.knobs import Categorical, algorithm_of
from bagua_autotune.model.reasons import did_lasting_harm
from bagua_autotune.model.statistics import Estimate, Interval, estimate
from bagua_autotune.store import Store
from bagua_autotune.store.observations import Steps
from bagua_wire.configuration import Configuration
from bagua_wire.knobs import ALGORITHM_KNOB, KNOBS, RECOMPUTED_KNOB
from bagua_wire.messages import BEING_TUNED

# The last ones of a trial: where that is the default's first one, most of its warm-up lies before.
LATEST_STEPS = 20
FEWEST_STEPS = 3
MOST_ALIKE = 4
"""Trials that compute alike: those of the lowest cost say how long that takes."""
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
    other, and where a knob says what they compute, which the default's steps say nothing of.

    Args:
        observations: of the default.
    """
    is_computing_tuned = any(knob in KNOBS and KNOBS[knob].computes for knob in job.space)
    told = paces(observations)
    if is_computing_tuned or len(told) < FEWEST_STEPS or not _is_bounded(job):
        return None
    return Ceiling(
        seconds=median(seconds for seconds, _ in told),
        exposed_seconds=median(max(0.0, seconds - computing) for seconds, computing in told),
        gain=estimate([_waited(*each) for each in told]).high,
    )


def least_cost(job: Job, told: Sequence[tuple[float, Sequence[Observation]]]) -> float | None:
    """Return what the fastest of some trials that compute alike would cost if it waited for no
    communication; None where that is not known. By each one's own steps: more messages at a time
    slow computing, too.

    Args:
        told: of each trial its cost, and its steps.
    """
    waited = [(cost, [_waited(*each) for each in paces(steps)]) for cost, steps in told]
    if sum(len(each) for _, each in waited) < FEWEST_STEPS or not _is_bounded(job):
        return None
    return min(cost - estimate(each).center for cost, each in waited if each)


def _waited(seconds: float, computing_seconds: float) -> float:
    """How much less a step would cost, as a logarithm, that waits for no communication."""
    least, most = LEAST_COMPUTING * seconds, seconds
    return math.log(seconds / min(max(computing_seconds, least), most))


def _is_bounded(job: Job) -> bool:
    """Whether the time that ranks compute bounds that of a step."""
    return OBJECTIVES[job.protocol].seconds(0.0) is not None and not _may_part(job)


def _may_part(job: Job) -> bool:
    """Whether the ranks may run without waiting for each other, which no slowest one bounds."""
    domain = job.space.get(ALGORITHM_KNOB)
    names = domain.values if isinstance(domain, Categorical) else ()
    choices = [job.baseline, *({ALGORITHM_KNOB: name} for name in names)]
    return any(algorithm_of(choice).when == "apart" for choice in choices)


# Where no bound is set, a round takes at most so long, or as long as so many trials: where a step
# takes half a minute, ten minutes are worth nothing.
USUAL_SECONDS, USUAL_TRIALS = 600.0, 20
# The time of so many trials is left for the confirmation, but at most this share of all.
CONFIRMING_TRIALS, MOST_CONFIRMING = 8, 0.5
# From one trial to the next it is usually so many; of few trials nobody can tell.
TRIAL_STEPS = 16
FEWEST_TRIALS = 4


class Floor(NamedTuple):
    """Where nothing recomputes fewer than so many blocks, no step costs less than ``cost``."""

    recomputed: int
    cost: float


@dataclass(frozen=True)
class Round:
    """One tuning of a job. Only trials of one round are compared: between two the machine changed.

    Attributes:
        trials: of this round.
        number: 0 is the first.
        before: how many trials the rounds before made.
        harmful: what was kept in a round before, and harmed the training in the long run.
        ceiling: what its default's steps say can be gained; None: that is not known.
        floor: what a step costs at least; None: that is not known.
    """

    job: Job
    trials: Sequence[Trial]
    number: int = 0
    before: int = 0
    harmful: Sequence[Trial] = ()
    ceiling: Ceiling | None = None
    floor: Floor | None = None

    @classmethod
    def of(cls, job: Job, trials: Sequence[Trial], number: int | None = None) -> Round:
        """The round of this number; without one the latest.

        Args:
            trials: of all rounds.
        """
        number = job.round if number is None else number
        own = [trial for trial in trials if trial.round == number]
        before = [trial for trial in trials if trial.round < number]
        return cls(job, own, number, len(before), list(filter(did_lasting_harm, before)))

    @classmethod
    def shown(cls, job: Job, trials: Sequence[Trial]) -> Round:
        """The round that is spoken of: the result's own where that is the last word, else the
        latest. They differ where the training ended while the job was tuned again.

        Args:
            trials: of all rounds.
        """
        return cls.of(job, trials, _number_shown(job))

    @property
    def objective(self) -> Objective:
        """What its costs mean."""
        return OBJECTIVES[self.job.protocol]

    @cached_property
    def defaults(self) -> Defaults:
        """The default's measurements."""
        return Defaults(self.job.baseline, self.trials)

    @cached_property
    def scale(self) -> float:
        """The difference of costs that is 100 %; 1 before the default is measured."""
        first = self.defaults.first
        return 1.0 if first is None else self.objective.scale(first.center)

    @cached_property
    def visits(self) -> Visits:
        """Its trials, with what their visits say together."""
        return Visits(self.trials, self.scale)

    @property
    def most_speedup(self) -> float | None:
        """How many times as fast as the default anything can be at most; None where that is not
        known, and where the result, which was confirmed, is above it: then computing
        itself takes less time."""
        is_its_own = is_settled(self.job) and self.number == _number_shown(self.job)
        result = self.job.result if is_its_own else None
        if self.ceiling is None or (result and result.speedup > self.ceiling.speedup):
            return None
        return self.ceiling.speedup

    @property
    def most_gain(self) -> float:
        """The most that the default's cost can become lower by; infinite where it is not known."""
        return self.ceiling.gain if self.ceiling else math.inf

    def believable(self, faster: Interval) -> Interval | None:
        """A measured speed-up as it may be told; None where it is more than is possible: noise.

        Whoever tells of one that is not confirmed has it from here.
        """
        most = math.inf if self.most_speedup is None else self.most_speedup
        if faster.center > most:
            return None
        return Interval(faster.center, faster.low, min(faster.high, most))

    @property
    def searched(self) -> list[Trial]:
        """The trials of the search, without those that confirm."""
        return [trial for trial in self.trials if trial.purpose == "search"]

    @property
    def open_trial(self) -> Trial | None:
        """What its ranks run now; None where that is decided, or the round is over."""
        return self.trials[-1] if self.trials and self.trials[-1].is_open else None

    @property
    def next_index(self) -> int:
        """The index of the trial that follows."""
        return self.before + len(self.trials)

    @property
    def stored_best(self) -> Configuration | None:
        """What the round begins with: the best of an earlier run, or of the round before."""
        if self.number > 0 and self.job.result:
            return self.job.result.configuration
        if self.job.inherited and self.job.inherited.configuration is not None:
            return Configuration(self.job.inherited.configuration)
        return None

    @property
    def began_at(self) -> float:
        """When its first trial began, in seconds since the epoch."""
        return _began_at(self.job, self.trials)

    @property
    def seconds(self) -> float:
        """Wall time from its first trial to the end of its last."""
        return _seconds(self.job, self.trials)

    @property
    def most_seconds(self) -> float:
        """The time that it may take, its confirmation too; what runs then is still measured."""
        given = self.job.limits.max_seconds
        if given is not None:
            return given
        if not self.objective.closes_itself:  # by its own protocol
            return math.inf
        return max(USUAL_SECONDS, USUAL_TRIALS * self._trial_seconds)

    @property
    def search_seconds(self) -> float:
        """The part of it that the search may take."""
        most = self.most_seconds
        return most - min(CONFIRMING_TRIALS * self._trial_seconds, MOST_CONFIRMING * most)

    @property
    def has_searched_long(self) -> bool:
        """Whether its search took all the time that it may."""
        return _seconds(self.job, self.searched) >= self.search_seconds

    @property
    def is_out_of_time(self) -> bool:
        """Whether it took all the time that it may, with its confirmation."""
        return self.seconds >= self.most_seconds

    @property
    def _trial_seconds(self) -> float:
        """The time from one trial of its search to the next."""
        return _seconds(self.job, self.searched) / max(1, len(self.searched))


def _number_shown(job: Job) -> int:
    was_cut_short = is_settled(job) and job.phase in CUT_SHORT
    return job.round - 1 if was_cut_short else job.round


def with_ceiling(store: Store, round_: Round) -> Round:
    """The round with what the steps of its default, and of the trials that compute least, which are
    in the store, say can be gained."""
    job, default = round_.job, round_.defaults.trial
    if default is None:
        return round_
    steps = store.observations.latest(job.id, default.index, LATEST_STEPS)
    if RECOMPUTED_KNOB not in job.baseline:
        return replace(round_, ceiling=ceiling(job, steps))
    known = [
        (trial.configuration.number(RECOMPUTED_KNOB), trial.estimate.center, trial.index)
        for trial in round_.visits.undisturbed
        if trial.estimate
    ]
    fewest = min(count for count, _, _ in known)
    alike = sorted((cost, index) for count, cost, index in known if count == fewest)
    # Each may have had but a step or two.
    told = [
        (cost, store.observations.latest(job.id, index, LATEST_STEPS))
        for cost, index in alike[:MOST_ALIKE]
    ]
    cost = least_cost(job, told)
    return round_ if cost is None else replace(round_, floor=Floor(fewest, cost))


def read_ceilings(store: Store, job: Job, trials: Sequence[Trial]) -> dict[int, Ceiling | None]:
    """By its number what each round's default says.

    Args:
        trials: of all rounds.
    """
    rounds = (Round.of(job, trials, number) for number in range(job.round + 1))
    return {each.number: with_ceiling(store, each).ceiling for each in rounds}


def _began_at(job: Job, trials: Sequence[Trial]) -> float:
    starts = [trial.started_at for trial in trials if trial.started_at is not None]
    return min(starts, default=job.last_contact_at)


def _seconds(job: Job, trials: Sequence[Trial]) -> float:
    """Return the seconds from the first of these trials to the end of the last; while one is open,
    up to the job's last word. Without the time in which the job was lost.
    """
    last_word = job.last_contact_at
    ends = [last_word if trial.is_open else trial.ended_at or last_word for trial in trials]
    return job.present_seconds(_began_at(job, trials), max(ends)) if ends else 0.0


def is_settled(job: Job) -> bool:
    """Whether its result is the last word: it is not if the job is tuned again."""
    return job.result is not None and job.phase not in BEING_TUNED


def measured_in(trials: Sequence[Trial], configuration: Configuration) -> Estimate | None:
    """The first measurement of a configuration."""
    return next(
        (t.estimate for t in trials if t.configuration == configuration and t.estimate), None
    )


def as_of_now(round_: Round, observed: Collection[Steps], is_spent: bool = False) -> Limits:
    """The job's limits, its remaining steps less those that it made since it was registered. A
    training that outlives what was expected of it is expected to run as long again. When the time
    is up there are as many samples as were taken.

    Args:
        observed: the steps of all the job's trials.
        is_spent: the round has cost all that it may.
    """
    limits, changes = round_.job.limits, {}
    if observed:
        made = max(steps.last for steps in observed) - min(steps.first for steps in observed)
        changes["remaining_steps"] = limits.remaining_steps - made % limits.remaining_steps
    if round_.has_searched_long or is_spent:
        tried = sum(trial.was_tried for trial in round_.searched)
        # A round after the first begins with what was kept, and compares the default with it.
        changes["max_samples"] = tried if round_.number == 0 else max(tried, 2)
    return limits.model_copy(update=changes)


def trial_steps(trials: Sequence[Trial], observed: Mapping[int, Steps]) -> float:
    """How many steps of the training lay between the first steps of two trials, on average: at
    least one, also where a client numbers each trial's steps anew.

    Args:
        trials: of a round.
        observed: the steps of all trials, by their index.
    """
    first_steps = [observed[trial.index].first for trial in trials if trial.index in observed]
    if len(first_steps) < FEWEST_TRIALS:
        return TRIAL_STEPS
    return max(1.0, (first_steps[-1] - first_steps[1]) / (len(first_steps) - 2))
