"""The next step of a job: closes its open trial once it is measured, and says what follows.

Takes long (a Gaussian process is fitted) and changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from bagua_autotune.deciding.decision import Keep, Propose, decide
from bagua_autotune.deciding.result import allowed_steps, bill, make_result, spent_steps
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring import complexity
from bagua_autotune.measuring.against_default import OBJECTIVES
from bagua_autotune.measuring.rounds import Round, as_of_now, measured_in, trial_steps, with_ceiling
from bagua_autotune.measuring.standing import best, lowest, standing
from bagua_autotune.measuring.visits import Visits, measured, settled, warmup_steps
from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.model.knobs import algorithm_of, numbers_changed
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.search import make_searcher
from bagua_autotune.store import Store
from bagua_autotune.store.observations import StepCost, Steps
from bagua_autotune.store.trials import Move
from bagua_wire.configuration import Configuration

logger = logging.getLogger(__name__)

FALLBACK_SEARCHER = "random"
# Of so many trials some steps may have come since they were closed.
TOLD_LATE = 2
# Of the time that a tuning may take, so much at most is waited for what the complexity does.
LEARNING_SHARE = 0.1


def _rival(round_: Round, trial: Trial) -> Estimate | None:
    """The estimate that the open trial has to beat; None while there is none."""
    if trial.purpose == "search":
        fastest = lowest(round_.trials)
        return fastest.estimate if fastest else None
    baseline = round_.job.baseline
    if trial.configuration != baseline:
        return round_.defaults.first
    confirming = (t for t in reversed(round_.trials) if t.purpose == "confirm" and t.estimate)
    winner = next((t for t in confirming if t.configuration != baseline), None)
    if winner is None:  # the default is looked at first
        found = best(round_)
        return found.estimate if found and found.configuration != baseline else None
    return winner.estimate


def _known(round_: Round) -> Visits | None:
    """What is known of visits: nothing before the default is measured."""
    return None if round_.defaults.first is None else round_.visits


def step_cost(job: Job, trial: Trial, observation: Observation) -> float:
    """Return what a step of the trial cost."""
    apart = algorithm_of(trial.configuration).when == "apart"
    return OBJECTIVES[job.protocol].cost(observation.values, apart)


class _Counted(NamedTuple):
    """A step that counts."""

    cost: float
    seconds: float
    complexity: float | None


def _told(trial: Trial, steps: Sequence[_Counted]) -> list[complexity.Step]:
    """The steps with their complexities; none where one is not known, or where no rank waits for
    the one with the largest batch."""
    if algorithm_of(trial.configuration).when == "apart":
        return []
    told = [complexity.Step(s.seconds, s.complexity) for s in steps if s.complexity is not None]
    return told if len(told) == len(steps) else []


def _first(round_: Round) -> Trial:
    """The trial of a round that teaches what the complexity does."""
    trials = round_.trials
    return next((trial for trial in trials if not trial.is_given_up), trials[-1])


def _learned(first: Trial, steps: Sequence[_Counted]) -> complexity.Correction | None:
    """Return the correction that the first trial of a round learns from the complexity."""
    # Steps that come after the trial was closed must not change what was learned.
    return complexity.learn(_told(first, steps[: complexity.LEARNING_STEPS]))


def _is_judged(round_: Round, configuration: Configuration) -> bool:
    """Whether a configuration leaves the numbers as they are, or a trial before it changed them in
    the same way. The first such trial is waited for: it is longer, so that its losses can be
    judged."""
    baseline = round_.job.baseline
    changed = numbers_changed(configuration, baseline)
    if not changed:
        return True
    if algorithm_of(configuration).when == "apart":
        return False  # ranks that do not wait for each other learn late what follows
    known = (trial.configuration for trial in round_.trials[:-1] if trial.estimate)
    return any(numbers_changed(other, baseline) == changed for other in known)


class NextStep:
    """Decides for all jobs of a store.

    Args:
        store: is only read.
        searcher: name of the search method, see bagua_autotune.search.
        knowledge: what is known of jobs.
        clock: seconds since the epoch.
    """

    def __init__(
        self, store: Store, searcher: str, knowledge: Knowledge, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._searcher = searcher
        self._knowledge = knowledge
        self._clock = clock
        self._has_told_failure = False

    def estimate(self, round_: Round, trial: Trial, stored: Sequence[StepCost]) -> Estimate | None:
        """The open trial's estimate if its observations suffice to close it.

        Args:
            stored: the cost of each of its steps, as the store has it.
        """
        job, objective = round_.job, round_.objective
        if not objective.closes_itself:
            return None
        steps = self._counted(job, trial, stored)
        costs = self._costs(round_, trial, steps)
        if costs is None:
            return None
        seconds, rival = [step.seconds for step in steps], _rival(round_, trial)
        known, tried = _known(round_), trial.configuration
        return measured(costs, seconds, job.limits, trial.purpose, rival, known, tried)

    def with_late_steps(self, round_: Round) -> list[Trial]:
        """The last measured trials and those that were left unmeasured, estimated from all their
        steps; without those of which that says nothing new.

        The ranks went on with a trial until they had switched, so most of its steps came after it
        had been closed, and a GPU's last ones with those of the next.
        """
        if not round_.objective.closes_itself:
            return []
        own = [trial for trial in round_.trials if trial is not round_.open_trial]
        last = own[-TOLD_LATE:]
        late = [trial for trial in own if trial.is_open or (trial.estimate and trial in last)]
        found = []
        for trial in late:
            if costs := self._costs(round_, trial, self._steps(round_.job, trial)):
                estimated = settled(costs, _known(round_), trial.configuration)
                found.append(replace(trial, state="measured", estimate=estimated))
        return [new for new in found if new not in own]

    def _costs(self, round_: Round, trial: Trial, steps: Sequence[_Counted]) -> list[float] | None:
        """The steps' costs, corrected for their data; None while that is still being learned."""
        costs, first = [step.cost for step in steps], _first(round_)
        if told := _told(trial, steps):
            is_first = trial.index == first.index
            most_seconds = LEARNING_SHARE * (round_.job.limits.max_seconds or math.inf)
            is_short = sum(step.seconds for step in told) < most_seconds
            if is_first and is_short and complexity.is_learning(told):
                return None
            if learned := _learned(first, steps if is_first else self._steps(round_.job, first)):
                return [round_.objective.cost((each,)) for each in learned.seconds(told)]
        return costs

    def remark(self, round_: Round, closed: Trial) -> str:
        """Return a remark on a measured trial for the job's users; mostly empty."""
        is_first = closed.index == _first(round_).index
        if not (is_first and closed.estimate and round_.objective.closes_itself):
            return ""
        job = round_.job
        steps = self._steps(job, closed)
        if not complexity.varies(_told(closed, steps)):
            return ""
        return complexity.describe(_learned(closed, steps))

    def _steps(self, job: Job, trial: Trial) -> list[_Counted]:
        """The trial's steps that count, from the store."""
        return self._counted(job, trial, self._store.observations.step_costs(job.id, trial.index))

    def _counted(self, job: Job, trial: Trial, stored: Sequence[StepCost]) -> list[_Counted]:
        """The steps that count; none while the job is warming up."""
        costs = [(step.cost, step.complexity) for step in stored if step.cost is not None]
        if len(costs) < len(stored):  # of Bagua's protocol, which stores none
            observed = self._store.observations.of(job.id, trial.index)
            costs = [(step_cost(job, trial, each), each.complexity) for _, each in observed]
        objective = OBJECTIVES[job.protocol]
        steps = [_Counted(cost, objective.seconds(cost) or 0.0, told) for cost, told in costs]
        first: int | None = 0
        if trial.index == 0:
            first = warmup_steps([step.seconds for step in steps], job.limits.warmup_seconds)
        return [] if first is None else steps[first:]

    def after(self, round_: Round, closing: Trial | None) -> Move:
        """What follows when no trial is open any more.

        Args:
            round_: the latest, the closing trial as it will be.
        """
        observed = self._store.observations.steps(round_.job.id)
        round_ = with_ceiling(self._store, round_)
        decision = self._decide(round_, observed)
        at = self._clock()
        step = Move(at)
        if closing:
            step = Move(at, closing.index, closing.estimate, closing.failure)
        if isinstance(decision, Propose):
            index, what = round_.next_index, decision.configuration
            trial = Trial(index, decision.purpose, what, round=round_.number)
            return replace(step, next_trial=trial)
        cost = bill(round_, observed, self._store.events.switch_seconds(round_.job.id))
        return replace(step, result=make_result(round_, decision, cost, at))

    def ahead(self, round_: Round, running: Trial) -> Trial | None:
        """What follows the trial that runs, whatever is measured of it; None where that has to be
        seen first.

        It is chosen as if the trial turned out as the search expects (Ginsbourger et al. 2010,
        "Kriging is well-suited to parallelize optimization": the kriging believer).
        """
        baseline, job = round_.defaults.first, round_.job
        if baseline is None or not round_.objective.closes_itself:
            return None
        is_again = measured_in(round_.trials[:-1], running.configuration) is not None
        if running.purpose == "confirm" or is_again:
            expected = standing(round_.trials, running.configuration)
            as_if = replace(running, state="measured", estimate=expected)
            round_ = replace(round_, trials=[*round_.trials[:-1], as_if])
        elif running.configuration in (job.baseline, round_.stored_best):
            return None
        round_ = with_ceiling(self._store, round_)
        decision = self._decide(round_, self._store.observations.steps(job.id))
        if not isinstance(decision, Propose):
            return None
        following, made = decision.configuration, sum(t.was_tried for t in round_.searched)
        is_other = decision.purpose != running.purpose
        if following == running.configuration or (is_other and made >= job.limits.max_samples):
            return None
        if not all(_is_judged(round_, c) for c in (following, running.configuration)):
            return None
        # What a confirmation would begin with is visited as part of the search, which goes on if
        # what runs, and was not measured before, turns out otherwise.
        purpose = decision.purpose if is_again else running.purpose
        return Trial(round_.next_index, purpose, following, round=round_.number)

    def _decide(self, round_: Round, observed: Mapping[int, Steps]) -> Propose | Keep:
        limits = as_of_now(round_, observed.values(), self._is_spent(round_, observed))
        now = replace(round_.job, limits=limits)
        per_trial = trial_steps(round_.trials, observed)
        return self._decide_by(self._searcher, replace(round_, job=now), per_trial)

    def _is_spent(self, round_: Round, observed: Mapping[int, Steps]) -> bool:
        """Whether tuning again has cost all that it may."""
        job = round_.job
        if round_.number == 0:
            return False
        trials = [t for t in self._store.trials.of(job.id) if t.round < round_.number]
        switched = self._store.events.switch_seconds(job.id)
        spent = spent_steps(job, [*trials, *round_.trials], observed, switched)
        return spent >= allowed_steps(observed)

    def _decide_by(self, method: str, round_: Round, per_trial: float) -> Propose | Keep:
        """Decide by a search method; by the random one if it fails, so that no job is held up."""
        try:
            return decide(
                round_,
                lambda: self._knowledge.problem(round_),
                partial(make_searcher, method),
                per_trial,
            )
        except Exception as error:
            if method == FALLBACK_SEARCHER:
                raise
            # Its traceback once: it fails for many trials in the same way.
            told, self._has_told_failure = self._has_told_failure, True
            logger.error(
                "job %s: the %s search failed (%r); trial %d is chosen by the %s one",
                round_.job.id,
                method,
                error,
                round_.next_index,
                FALLBACK_SEARCHER,
                exc_info=None if told else error,
            )
            return self._decide_by(FALLBACK_SEARCHER, round_, per_trial)
