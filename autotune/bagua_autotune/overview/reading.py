"""What is read of a job to sum it up: a few aggregates, and its latest steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.store import Store, digests
from bagua_autotune.store.digests import Steps
from bagua_autotune.tuning.objective import OBJECTIVES, Objective
from bagua_autotune.tuning.rounds import of_round

LATEST_STEPS = 20


@dataclass(frozen=True)
class Reading:
    """A job as it is in the store.

    Attributes:
        trials: of all rounds.
        steps: by trial index the steps that were observed.
        switch_seconds: by trial index.
        latest: the last steps of the newest observed trial, at most LATEST_STEPS.
    """

    job: Job
    trials: Sequence[Trial]
    steps: Mapping[int, Steps]
    switch_seconds: Mapping[int, float]
    latest: Sequence[Observation]

    @property
    def objective(self) -> Objective:
        return OBJECTIVES[self.job.protocol]

    @property
    def round(self) -> list[Trial]:
        """The trials of the latest round."""
        return of_round(self.trials, self.job.round)


def read(store: Store, job_id: str) -> Reading:
    """Raises UnknownJob if there is no such job."""
    with store.database.reading():
        # The trials first, for databases that show each query what is new: what happens meanwhile
        # is then an open trial of a job that moved on, and never a job that waits for nothing.
        trials = store.trials(job_id)
        return Reading(
            job=store.job(job_id),
            trials=trials,
            steps=digests.steps(store, job_id),
            switch_seconds=digests.switch_seconds(store, job_id),
            latest=digests.latest_observations(store, job_id, LATEST_STEPS),
        )
