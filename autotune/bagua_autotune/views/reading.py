"""What is read of a job to sum it up: a few aggregates, and its latest steps."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bagua_autotune.measuring.against_default import OBJECTIVES, Objective
from bagua_autotune.measuring.rounds import Ceiling, Round, is_settled, read_ceilings
from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.store import Store
from bagua_autotune.store.observations import Steps

LATEST_STEPS = 20


@dataclass(frozen=True)
class Reading:
    """A job as it is in the store.

    Attributes:
        trials: of all rounds.
        steps: by trial index the steps that were observed.
        switch_seconds: by trial index.
        latest: the last steps of the newest observed trial, at most LATEST_STEPS; once the job
            is tuned, of what was kept, as the last trial may have been of something else.
        drifts: lasting changes of the step times that the ranks told of.
        drifted_seconds: what a step took when the ranks last told of a lasting change, since
            the job is tuned.
        ceilings: by the number of the round; none where it is not known.
    """

    job: Job
    trials: Sequence[Trial]
    steps: Mapping[int, Steps]
    switch_seconds: Mapping[int, float]
    latest: Sequence[Observation]
    drifts: int = 0
    drifted_seconds: float | None = None
    ceilings: Mapping[int, Ceiling | None] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[self.job.protocol]

    @cached_property
    def shown(self) -> Round:
        """The round that figures and explanations speak of."""
        return self._under_ceiling(Round.shown(self.job, self.trials))

    def round(self, number: int) -> Round:
        """The round of this number."""
        return self._under_ceiling(Round.of(self.job, self.trials, number))

    def _under_ceiling(self, round_: Round) -> Round:
        return replace(round_, ceiling=self.ceilings.get(round_.number))


def read(store: Store, job_id: str) -> Reading:
    """Raises UnknownJob if there is no such job."""
    with store.database.reading():
        job, trials = store.jobs.get(job_id), store.trials.of(job_id)
        steps, drifts = store.observations.steps(job_id), store.events.count(job_id, "drift")
        running = _running(job, trials, steps)
        return Reading(
            job=job,
            trials=trials,
            steps=steps,
            switch_seconds=store.events.switch_seconds(job_id),
            latest=(
                store.observations.latest(job_id, running, LATEST_STEPS)
                if running is not None
                else []
            ),
            drifts=drifts,
            drifted_seconds=_drifted_seconds(store, job) if drifts else None,
            ceilings=read_ceilings(store, job, trials),
        )


def _running(job: Job, trials: Sequence[Trial], observed: Container[int]) -> int | None:
    """The newest observed trial of what runs now."""
    kept = job.result.configuration if job.result and is_settled(job) else None
    return next(
        (
            trial.index
            for trial in reversed(trials)
            if trial.index in observed and kept in (None, trial.configuration)
        ),
        None,
    )


def _drifted_seconds(store: Store, job: Job) -> float | None:
    if job.finished_at is None:
        return None
    newest = store.events.of(job.id, 1, "drift")
    return newest[0].seconds if newest and newest[0].at >= job.finished_at else None
