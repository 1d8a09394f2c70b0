"""Bagua's four requests, carried out by the shared tuner.

A worker registers, asks at iteration 0, then reports and asks every 100 iterations.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean, median

from bagua_autotune.measuring.against_default import bounded
from bagua_autotune.model.job import CONTACT_SECONDS, Job, Limits, Observation
from bagua_autotune.tuning.cache import Cache
from bagua_autotune.tuning.tuner import Tuner
from bagua_v1 import hyperparameters
from bagua_v1.directory import Changed, Directory, Known, Storage
from bagua_v1.family import Family, Grant, Model, Window
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Tensor

# The trials of a job whose ranks report each by itself.
#
# A trial is measured by the reports made under its hyperparameters.  Once it is measured well
# enough, what follows is decided in the background while the ranks go on; they switch at the first
# later iteration that all reach from the same earlier one.  All of this is in the store: after a
# restart the next such iteration decides anew, or finds the decision made.
#
# At that iteration the first rank's ask decides, and the others' reports of the last window (one
# report of each rank) are often still under way.  Ranks differ in speed, so the mean of those
# present may be off by more than configurations differ: such windows are corrected.

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
        is_new = self._store.observations.add_value(job.id, index, step, rank, window.speed, now)
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
        job, trial = self._store.jobs.get(job.id), self._tuner.open_trial(job.id)
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
        windows = [window for _, window in self._store.observations.of(job.id, index)]
        rank_count, references = self._world_size or len(family.present), windows
        if any(len(_present(window)) < rank_count for window in windows):
            references = [window for _, window in self._store.observations.of(job.id)]
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


# Ranks at different iterations for so long will hardly meet again.
APART_ITERATIONS = 3
MOST_RANKS_TOLD = 4
# So long after its last contact a job still takes spans.
SPAN_SECONDS = 86_400.0
# Of how many jobs the tensors and the last answer are kept in memory.
JOBS_AT_HAND = 256


class RankOutsideWorld(ValueError):
    """A rank that cannot exist in a job of this world size."""


class BaguaTuning:
    """Does what Bagua's ``AutotuneService`` did, with our store and tuner.

    Args:
        world_size: how many ranks a job has; None: those seen.
        default_bucket_bytes: the default of every job.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        tuner: Tuner,
        limits: Limits,
        world_size: int | None,
        default_bucket_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tuner = tuner
        self._store = tuner.store
        self._world_size = world_size
        self._default_bucket_bytes = default_bucket_bytes
        self._clock = clock
        self._storage = Storage(self._store)
        self._trials = Trials(tuner, world_size, clock)
        self._directory = Directory(tuner, self._storage, limits, world_size, clock)
        # A job's tensors never change, and every answer needs them.
        self._tensors = lru_cache(maxsize=JOBS_AT_HAND)(self._store.jobs.tensors)
        self._wires: Cache[str] = Cache(JOBS_AT_HAND)
        self._jobs: Cache[Job] = Cache(JOBS_AT_HAND)
        self._names: dict[str, frozenset[str]] = {}

    def register(
        self, model_name: str, tensors: Sequence[Tensor], whether_to_bucket: bool = True
    ) -> str:
        """Register a model; return the hyperparameters to begin with, in JSON: the default."""
        size = self._default_bucket_bytes if whether_to_bucket else hyperparameters.UNBUCKETED_BYTES
        job = self._directory.register(model_name, tensors, size)
        return self._wire(job, job.baseline)

    def ask(self, model_name: str, rank: int, iteration: int) -> tuple[str, bool]:
        """The hyperparameters to use from now on, in JSON, and whether they are final.

        Raises:
            NotRegistered: nobody registered the model.
            RankOutsideWorld: there is no such rank.
        """
        self._check_rank(rank)

        def asked(known: Known) -> tuple[Family, int]:
            family = known.family
            if family.is_entering(rank, model_name, iteration):
                return family.entered(rank, iteration, self._clock()), 0
            position = family.position(rank, model_name) or 0
            grant: Grant | None = None
            if family.is_due(position, iteration, self._world_size):
                # Perhaps as it was before its last change.
                job = self._jobs.known(family.models[position].job_id)
                job = job or self._directory.job(model_name, known, position)
                grant = self._trials.next_grant(job, family, position, iteration, len(known.order))
            return family.asked(rank, model_name, iteration, grant, self._world_size), position

        found = self._storage.change(self._directory.alias(model_name), asked)
        job = self._heard_of(model_name, found)
        before, after = found.before.family, found.after.family
        if before.is_entering(rank, model_name, iteration):
            if before.names and not after.names:
                again = "job %s: its ranks start again with the default; tuning goes on"
                logger.info(again, job.id)
            return self._wire(job, job.baseline), False
        if before.apart_count < APART_ITERATIONS <= after.apart_count:
            self._warn_apart(job, after)
        grant = after.models[found.position].grant_at(iteration)
        order = found.before.order[: grant.ordered]
        return self._wire(job, grant.configuration, order), grant.is_final

    def report(
        self, model_name: str, rank: int, iteration: int, ran: Configuration, speed: float
    ) -> None:
        """Take one rank's mean speed since its last report, under the configuration it ran.

        Raises:
            NotRegistered: nobody registered the model.
            RankOutsideWorld: there is no such rank.
        """
        self._check_rank(rank)
        window, now = Window(iteration=iteration, speed=bounded(speed)), self._clock()

        def reported(known: Known) -> tuple[Family, int]:
            is_baseline = ran == Configuration(known.family.baseline)
            family = known.family.reported(rank, model_name, window, is_baseline, now)
            return family, family.position(rank, model_name) or 0

        found = self._storage.change(self._directory.alias(model_name), reported)
        job = self._heard_of(model_name, found)
        self._trials.measure(job, found.after.family, found.position, rank, window, ran)

    def order(self, names: Iterable[str]) -> None:
        """Note the order in which tensors became ready in some model: spans do not say in which.

        A name counts for every family that has such a tensor and is still being tuned; unknown
        names are dropped.
        """
        names = list(dict.fromkeys(names))
        tuned = self._store.families.being_tuned(self._clock() - SPAN_SECONDS)
        known: dict[str, frozenset[str]] = {}
        for key, job_id in tuned.items():
            known[key] = self._names.get(key) or frozenset(
                tensor.name for tensor in self._store.jobs.tensors(job_id)
            )
            new = [name for name in names if name in known[key]]
            if new:
                self._store.families.extend_order(key, new)
        self._names = known

    def _heard_of(self, model_name: str, found: Changed) -> Job:
        """The model's job. Stores its last contact, and the number of its ranks if no world size is
        known."""
        family, position = found.after.family, found.position
        now, (created_at, revision, last_contact_at) = self._clock(), found.job
        job = self._jobs.get(
            family.models[position].job_id,
            (created_at, revision) if created_at is not None else object(),
            lambda: self._directory.job(model_name, found.after, position),
        )
        if job.is_lost:
            self._store.jobs.resume(job.id, now)
        elif now - (last_contact_at or now) >= CONTACT_SECONDS:
            self._store.jobs.touch(job.id, now)
        if self._world_size is None and job.world_size < len(family.present):
            self._store.jobs.widen(job.id, len(family.present))
        return job

    def _wire(self, job: Job, configuration: Mapping[str, Value], order: Sequence[str] = ()) -> str:
        """Hyperparameters in JSON: for hundreds of tensors they take longer than all else. The
        order of a job only ever grows, so its length says which it is."""

        def make() -> str:
            known = hyperparameters.in_execution_order(self._tensors(job.id), order)
            return json.dumps(hyperparameters.to_wire(known, configuration))

        which = len(order), configuration["bucket_bytes"], configuration["hierarchical"]
        return self._wires.get(job.id, which, make)

    def _warn_apart(self, job: Job, family: Family) -> None:
        places = family.stragglers(self._world_size)
        told = [
            f"rank {rank} at iteration {at}" if at >= 0 else f"rank {rank} has not reported"
            for rank, at in sorted(places.items(), key=lambda place: -place[1])
        ]
        if len(places) > MOST_RANKS_TOLD:
            told[MOST_RANKS_TOLD:] = [f"{len(places)} in all"]
        logger.warning(
            "job %s: not tuned, because its ranks are at different iterations (%s); all keep their "
            "hyperparameters. Restart all ranks, give each run a service of its own, and start "
            "that with the number of ranks as --world-size",
            job.id,
            ", ".join(told),
        )

    def _check_rank(self, rank: int) -> None:
        if self._world_size is not None and rank >= self._world_size:
            raise RankOutsideWorld(f"rank {rank} is not below the world size {self._world_size}")
