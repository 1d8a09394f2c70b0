"""The next step of a job: closes its open trial once it is measured, and says what follows.

Takes long (a Gaussian process is fitted) and changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from bagua_autotune.model.algorithms import algorithm_of
from bagua_autotune.model.job import Job, Observation, Result, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.search import make_searcher
from bagua_autotune.store import Step, StepCost, Store
from bagua_autotune.tuning import complexity
from bagua_autotune.tuning.ceiling import read_ceiling
from bagua_autotune.tuning.comparison import Defaults
from bagua_autotune.tuning.decision import Keep, Propose, decide
from bagua_autotune.tuning.knowledge import Knowledge
from bagua_autotune.tuning.measurement import measured, warmup_steps
from bagua_autotune.tuning.objective import OBJECTIVES
from bagua_autotune.tuning.result import bill, make_result
from bagua_autotune.tuning.rounds import as_of_now, of_round, trial_steps
from bagua_autotune.tuning.standing import baseline_estimate, lowest

logger = logging.getLogger(__name__)

FALLBACK_SEARCHER = "random"


def _rival(job: Job, trials: Sequence[Trial], trial: Trial) -> Estimate | None:
    """What the open trial is compared with."""
    if trial.purpose == "search":
        fastest = lowest(trials)
        return fastest.estimate if fastest else None
    if trial.configuration != job.baseline:
        return baseline_estimate(job, trials)
    confirming = (t for t in reversed(trials) if t.purpose == "confirm" and t.estimate)
    winner = next((t for t in confirming if t.configuration != job.baseline), None)
    return winner.estimate if winner else None


def step_cost(job: Job, trial: Trial, observation: Observation) -> float:
    """What a step of the trial cost."""
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


def _first(trials: Sequence[Trial]) -> Trial:
    """The trial of a round that teaches what the complexity does."""
    return next((trial for trial in trials if trial.state != "failed"), trials[-1])


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

    def estimate(
        self, job: Job, trials: Sequence[Trial], trial: Trial, stored: Sequence[StepCost]
    ) -> Estimate | None:
        """The open trial's estimate if its observations suffice to close it.

        Args:
            stored: the cost of each of its steps, as the store has it.
        """
        objective = OBJECTIVES[job.protocol]
        if not objective.closes_itself:
            return None
        steps = self._counted(job, trial, stored)
        current = of_round(trials, job.round)
        costs, first = [step.cost for step in steps], _first(current)
        if told := _told(trial, steps):
            if trial.index == first.index and len(told) < complexity.LEARNING_STEPS:
                return None
            if correction := self._learned(job, first):
                costs = [objective.cost((each,)) for each in correction.seconds(told)]
        baseline = baseline_estimate(job, current)
        rival = _rival(job, current, trial)
        scale = objective.scale(baseline.center) if baseline else 1.0
        seconds = [step.seconds for step in steps]
        return measured(costs, seconds, job.limits, trial.purpose, rival, scale)

    def remark(self, job: Job, trials: Sequence[Trial], closed: Trial) -> str:
        """What the job's users may want to know of a trial that was measured; mostly nothing."""
        is_first = closed.index == _first(of_round(trials, job.round)).index
        if not (is_first and closed.estimate and OBJECTIVES[job.protocol].closes_itself):
            return ""
        steps = self._counted(job, closed, self._store.step_costs(job.id, closed.index))
        is_told = bool(_told(closed, steps))
        return complexity.describe(self._learned(job, closed)) if is_told else ""

    def _learned(self, job: Job, first: Trial) -> complexity.Correction | None:
        """What the first trial of a round says of the complexity."""
        steps = self._counted(job, first, self._store.step_costs(job.id, first.index))
        # Steps that come after the trial was closed must not change what was learned.
        return complexity.learn(_told(first, steps[: complexity.LEARNING_STEPS]))

    def _counted(self, job: Job, trial: Trial, stored: Sequence[StepCost]) -> list[_Counted]:
        """The steps that count; none while the job is warming up."""
        costs = [(step.cost, step.complexity) for step in stored if step.cost is not None]
        if len(costs) < len(stored):  # begun under a release that stored none
            observed = self._store.observations(job.id, trial.index)
            costs = [(step_cost(job, trial, each), each.complexity) for _, each in observed]
        objective = OBJECTIVES[job.protocol]
        steps = [_Counted(cost, objective.seconds(cost) or 0.0, told) for cost, told in costs]
        first: int | None = 0
        if trial.index == 0:
            first = warmup_steps([step.seconds for step in steps], job.limits.warmup_seconds)
        return [] if first is None else steps[first:]

    def after(self, job: Job, trials: Sequence[Trial], closing: Trial | None) -> Step:
        """What follows when no trial is open any more.

        Args:
            trials: all of the job's, the closing one as it will be.
        """
        decision = self._decide(job, trials)
        at = self._clock()
        step = Step(at)
        if closing:
            step = Step(at, closing.index, closing.estimate, closing.failure)
        if isinstance(decision, Propose):
            index = len(trials)
            trial = Trial(index, decision.purpose, decision.configuration, round=job.round)
            return replace(step, next_trial=trial)
        return replace(step, result=self._result(job, of_round(trials, job.round), decision, at))

    def _result(self, job: Job, trials: Sequence[Trial], kept: Keep, at: float) -> Result:
        objective = OBJECTIVES[job.protocol]
        cost = bill(
            trials,
            self._store.observed_steps(job.id),
            self._store.switch_seconds(job.id),
            Defaults(job.baseline, trials),
            objective,
        )
        return make_result(job, trials, kept, objective, cost, at)

    def _decide(self, job: Job, trials: Sequence[Trial]) -> Propose | Keep:
        steps = self._store.observed_steps(job.id)
        current = of_round(trials, job.round)
        now = replace(job, limits=as_of_now(job, current, steps.values()))
        per_trial = trial_steps(current, steps)
        ceiling = read_ceiling(self._store, job, current)
        most_gain = ceiling.gain if ceiling else math.inf
        return self._decide_by(self._searcher, now, trials, per_trial, most_gain)

    def _decide_by(
        self, method: str, job: Job, trials: Sequence[Trial], per_trial: float, most_gain: float
    ) -> Propose | Keep:
        """Decide by a search method; by the random one if it fails, so that no job is held up."""
        try:
            return decide(
                job,
                of_round(trials, job.round),
                OBJECTIVES[job.protocol],
                lambda: self._knowledge.problem(job, trials),
                partial(make_searcher, method),
                per_trial,
                most_gain,
            )
        except Exception as error:
            if method == FALLBACK_SEARCHER:
                raise
            # Its traceback once: it fails for many trials in the same way.
            told, self._has_told_failure = self._has_told_failure, True
            logger.error(
                "job %s: the %s search failed (%r); trial %d is chosen by the %s one",
                job.id,
                method,
                error,
                len(trials),
                FALLBACK_SEARCHER,
                exc_info=None if told else error,
            )
            return self._decide_by(FALLBACK_SEARCHER, job, trials, per_trial, most_gain)
