"""The trials of a job whose ranks report each by itself.

A trial is measured by the reports made under its hyperparameters.  Once it is measured well enough,
what follows is decided in the background while the ranks go on; they switch at the first later
iteration that all reach from the same earlier one.  All of this is in the store: after a restart
the next such iteration decides anew, or finds the decision made.

At that iteration the first rank's ask decides, and the others' reports of the last window (one
report of each rank) are often still under way.  Ranks differ in speed, so the mean of those present
may be off by more than configurations differ: such windows are corrected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from statistics import fmean, median

from bagua_autotune.bagua.family import Family, Grant, Model, Window
from bagua_autotune.measuring.objective import bounded
from bagua_autotune.model.job import Job, Observation
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.tuning.tuner import Tuner

logger = logging.getLogger(__name__)

# A trial whose first two windows differ by more than this goes on: an occasional pause must not
# decide which configuration wins.
AGREEMENT_RATIO = 0.05
MOST_WINDOWS = 4


class Trials:
    """Measures the trials of jobs and says when their ranks may switch.

    Args:
        world_size: how many ranks a job has; None: those seen.
        clock: seconds since the epoch.
    """

    def __init__(self, tuner: Tuner, world_size: int | None, clock: Callable[[], float]) -> None:
        self._tuner = tuner
        self._store = tuner.store
        self._world_size = world_size
        self._clock = clock

    def measure(
        self, job: Job, family: Family, position: int, rank: int, window: Window, ran: Configuration
    ) -> None:
        """Store a rank's window, if the rank ran the trial that it was told to run."""
        model = family.models[position]
        grant = model.grant_at(window.iteration - 1)  # what the rank ran in that window
        index = grant.trial
        if index is None or ran != Configuration(grant.configuration):
            return
        step, now = model.steps_before + window.iteration, self._clock()
        is_new = self._store.add_value(job.id, index, step, rank, window.speed, now)
        if is_new and index != model.grant.trial:
            self._reestimate(job, family, index)

    def next_grant(
        self, job: Job, family: Family, position: int, iteration: int, ordered: int
    ) -> Grant | None:
        """Return what all ranks switch to at this iteration; None: they go on unchanged.

        Args:
            job: perhaps as it was before its last change.
            ordered: how many names of the execution order are known.
        """
        model, now = family.models[position], self._clock()
        current = model.grant
        if current.is_final or (job.result is None and self._is_cold(job, model)):
            return None
        job, trial = self._store.job(job.id), self._tuner.open_trial(job.id)
        if job.result is None:
            if trial is None or not self._may_switch(job, family, model, trial.index):
                return None
            configuration, index = trial.configuration, trial.index
        else:
            configuration, index = job.result.configuration, None
        if current.trial is not None:
            # The windows run while the decision was made count, too.
            self._reestimate(job, family, current.trial)
        return Grant(
            from_iteration=iteration,
            configuration=dict(configuration),
            trial=index,
            ordered=ordered,
            is_final=index is None,
            at=now,
        )

    def _is_cold(self, job: Job, model: Model) -> bool:
        elapsed_seconds = self._clock() - model.grant.at
        is_over = model.is_warm() or elapsed_seconds >= job.limits.warmup_seconds
        return model.is_warming_up and not (model.warm_up and is_over)

    def _may_switch(self, job: Job, family: Family, model: Model, index: int) -> bool:
        """Whether the ranks are warm and do not run the open trial yet."""
        if model.is_warming_up:
            if self._is_cold(job, model):
                return False
            logger.info("job %s: warmed up, measuring trial %d", job.id, index)
            return True
        if index != model.grant.trial:
            return True
        windows = self._windows(job, family, index)
        elapsed_seconds = self._clock() - model.grant.at
        if are_enough(windows, elapsed_seconds >= job.limits.trial_seconds):
            self._tuner.close_trial(job.id, index, windows)
        return False

    def _reestimate(self, job: Job, family: Family, index: int) -> None:
        self._tuner.reestimate(job.id, index, self._windows(job, family, index))

    def _windows(self, job: Job, family: Family, index: int) -> list[Observation]:
        """The windows reported under a trial that can be compared with those of other trials."""
        windows = [window for _, window in self._store.observations(job.id, index)]
        rank_count, references = self._world_size or len(family.present), windows
        if any(len(_present(window)) < rank_count for window in windows):
            references = [window for _, window in self._store.observations(job.id)]
        found = comparable(windows, references, rank_count)
        if not found and len(windows) >= MOST_WINDOWS:
            return windows  # a rank that never reports must not stop the tuning
        return found


def are_enough(windows: Sequence[Observation], is_long: bool) -> bool:
    """Whether a trial is measured: two windows that agree, or three if it took long, or four."""
    if len(windows) != 2:
        return len(windows) >= (MOST_WINDOWS - 1 if is_long else MOST_WINDOWS)
    first, second = (_mean(window, _present(window)) for window in windows)
    return abs(first - second) <= AGREEMENT_RATIO * (abs(first) + abs(second)) / 2


def comparable(
    windows: Sequence[Observation], references: Sequence[Observation], rank_count: int
) -> list[Observation]:
    """The windows as if all ranks had reported; those that cannot be estimated are left out.

    Args:
        windows: of one trial.
        references: windows of all the job's trials; complete ones show how ranks differ.
        rank_count: how many reports make a window complete.
    """
    complete = [window for window in references if len(_present(window)) >= rank_count]
    found = []
    for window in windows:
        if len(_present(window)) >= rank_count:
            found.append(window)
        elif alike := [other for other in complete if _present(window) <= _present(other)]:
            found.append(Observation(window.step, (_mean_of_all(window, alike),)))
    return found


def _mean_of_all(window: Observation, complete: Sequence[Observation]) -> float:
    """The mean over all ranks, estimated from the ranks that are present.

    By the ratio of the means, or by their difference if the means have different signs.
    """
    present = _present(window)
    mean = _mean(window, present)
    parts = [_mean(other, present) for other in complete]
    wholes = [_mean(other, _present(other)) for other in complete]
    means = (mean, *parts, *wholes)
    if min(means) > 0 or max(means) < 0:
        return bounded(mean * median(w / p for w, p in zip(wholes, parts, strict=True)))
    return bounded(mean + median(w - p for w, p in zip(wholes, parts, strict=True)))


def _present(window: Observation) -> set[int]:
    return {rank for rank, value in enumerate(window.values) if value is not None}


def _mean(window: Observation, ranks: set[int]) -> float:
    return fmean(window.values[rank] or 0.0 for rank in ranks)
