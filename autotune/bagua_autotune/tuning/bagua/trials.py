"""The trials of a job whose ranks report by themselves.

A trial is measured by the reports made under its hyperparameters.  Once it is measured enough,
what follows is decided in the background while the ranks go on as they are; they switch at the
first later iteration to which all go from one before.  Nothing of this is remembered but in the
store: after a restart the next such iteration decides anew, or finds the decision taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from bagua_autotune.model.job import Job, Observation
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.store import ranks
from bagua_autotune.tuning.bagua.family import Family, Grant, Model, Window
from bagua_autotune.tuning.bagua.windows import MOST_WINDOWS, are_enough, comparable
from bagua_autotune.tuning.tuner import Tuner

logger = logging.getLogger(__name__)


class Trials:
    """Measures the trials of jobs and says when their ranks may switch.

    Args:
        world_size: how many ranks a job has; None: those seen.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        tuner: Tuner,
        world_size: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._tuner = tuner
        self._store = tuner.store
        self._world_size = world_size
        self._clock = clock

    def measure(
        self, job: Job, family: Family, position: int, rank: int, window: Window, ran: Configuration
    ) -> None:
        """Take in a rank's window, if it ran the trial that the ranks were told to run then."""
        model = family.models[position]
        grant = model.grant_before(window.iteration)
        index = grant.trial
        if index is None or ran != Configuration(grant.configuration):
            return
        step, now = model.steps_before + window.iteration, self._clock()
        is_new = ranks.put_value(self._store, job.id, index, step, rank, window.speed, now)
        if is_new and index != model.grant.trial:
            self._reestimate(job, family, index)

    def next_grant(
        self, job: Job, family: Family, position: int, iteration: int, ordered: int
    ) -> Grant | None:
        """What all ranks switch to at this iteration; None: they go on as they are.

        Args:
            ordered: how many names of the execution order are known.
        """
        model, now = family.models[position], self._clock()
        current = model.grant
        if current.is_final:
            return None
        job, trial = self._store.job(job.id), self._tuner.open_trial(job.id)
        if job.result is None:
            if trial is None or not self._may_switch(job, family, model, trial.index):
                return None
            configuration, index = trial.configuration, trial.index
        else:
            configuration, index = job.result.configuration, None
        if current.trial is not None:
            # The windows that were run while the decision was made count too.
            self._reestimate(job, family, current.trial)
        return Grant(
            from_iteration=iteration,
            configuration=dict(configuration),
            trial=index,
            ordered=ordered,
            is_final=index is None,
            at=now,
        )

    def _may_switch(self, job: Job, family: Family, model: Model, index: int) -> bool:
        """Whether the open trial is one that the ranks do not run yet, and they are warm."""
        elapsed_seconds = self._clock() - model.grant.at
        if model.is_warming_up:
            is_over = model.is_warm() or elapsed_seconds >= job.limits.warmup_seconds
            if model.warm_up and is_over:
                logger.info("job %s: warm, measuring trial %d", job.id, index)
                return True
            return False
        if index != model.grant.trial:
            return True
        windows = self._windows(job, family, index)
        if are_enough(windows, elapsed_seconds >= job.limits.trial_seconds):
            self._tuner.close_trial(job.id, index, windows)
        return False

    def _reestimate(self, job: Job, family: Family, index: int) -> None:
        self._tuner.reestimate(job.id, index, self._windows(job, family, index))

    def _windows(self, job: Job, family: Family, index: int) -> list[Observation]:
        """What was reported under a trial, as far as it can be compared with other trials."""
        observed = self._store.observations(job.id)
        windows = [window for trial, window in observed if trial == index]
        rank_count = self._world_size or len(family.present)
        found = comparable(windows, [window for _, window in observed], rank_count)
        if not found and len(windows) >= MOST_WINDOWS:
            return windows  # a rank that never reports must not stop the tuning
        return found
