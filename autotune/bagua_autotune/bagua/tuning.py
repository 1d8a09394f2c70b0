"""Bagua's four requests, carried out by the shared tuner.

A worker registers, asks at iteration 0, then reports and asks every 100 iterations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from bagua_autotune.bagua import hyperparameters, storage
from bagua_autotune.bagua.directory import Directory
from bagua_autotune.bagua.family import Family, Grant, Window
from bagua_autotune.bagua.trials import Trials
from bagua_autotune.measuring.objective import bounded
from bagua_autotune.model.job import CONTACT_SECONDS, Job, Limits
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.layout import Tensor
from bagua_autotune.tuning.tuner import Tuner

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 10 * 1024**2
# Ranks at different iterations for so long will hardly meet again.
APART_ITERATIONS = 3
MOST_RANKS_TOLD = 4
# So long after its last contact a job still takes spans.
SPAN_SECONDS = 86_400.0
# How many jobs' tensors are kept in memory.
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
        world_size: int | None = None,
        default_bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tuner = tuner
        self._store = tuner.store
        self._world_size = world_size
        self._default_bucket_bytes = default_bucket_bytes
        self._clock = clock
        self._trials = Trials(tuner, world_size, clock)
        self._directory = Directory(tuner, limits, world_size, clock)
        # A job's tensors never change, and every answer needs them.
        self._tensors = lru_cache(maxsize=JOBS_AT_HAND)(self._store.tensors)
        self._names: dict[str, frozenset[str]] = {}

    def register(
        self, model_name: str, tensors: Sequence[Tensor], whether_to_bucket: bool = True
    ) -> dict[str, Any]:
        """Register a model; return the hyperparameters to begin with: the default."""
        size = self._default_bucket_bytes if whether_to_bucket else hyperparameters.UNBUCKETED_BYTES
        job = self._directory.register(model_name, tensors, size)
        return hyperparameters.to_wire(self._tensors(job.id), job.baseline)

    def ask(self, model_name: str, rank: int, iteration: int) -> tuple[dict[str, Any], bool]:
        """The hyperparameters to use from now on, and whether they are final.

        Raises:
            NotRegistered: nobody registered the model.
            RankOutsideWorld: there is no such rank.
        """
        self._check_rank(rank)
        key = self._directory.key(model_name)
        family, order = storage.load(self._store, key)
        if family.is_entering(rank, model_name, iteration):
            job = self._enter(model_name, key, family, rank, iteration)
            return hyperparameters.to_wire(self._tensors(job.id), job.baseline), False
        position = family.position(rank, model_name) or 0
        job = self._heard_of(self._directory.job(model_name, key, family, position), family)
        next_grant: Grant | None = None
        if family.is_due(position, iteration, self._world_size):
            next_grant = self._trials.next_grant(job, family, position, iteration, len(order))
        after = storage.update(
            self._store,
            key,
            lambda f: f.asked(rank, model_name, iteration, next_grant, self._world_size),
        )
        if family.apart_count < APART_ITERATIONS <= after.apart_count:
            self._warn_apart(job, after)
        grant = after.models[position].grant_at(iteration)
        if grant.ordered > len(order):  # another rank's ask was granted meanwhile
            _, order = storage.load(self._store, key)
        known = hyperparameters.in_execution_order(self._tensors(job.id), order[: grant.ordered])
        return hyperparameters.to_wire(known, grant.configuration), grant.is_final

    def report(
        self, model_name: str, rank: int, iteration: int, ran: Configuration, speed: float
    ) -> None:
        """Take one rank's mean speed since its last report, under the configuration it ran.

        Raises:
            NotRegistered: nobody registered the model.
            RankOutsideWorld: there is no such rank.
        """
        self._check_rank(rank)
        window = Window(iteration=iteration, speed=bounded(speed))
        key, now = self._directory.key(model_name), self._clock()
        family = storage.update(
            self._store,
            key,
            lambda f: f.reported(rank, model_name, window, ran == Configuration(f.baseline), now),
        )
        position = family.position(rank, model_name) or 0
        job = self._heard_of(self._directory.job(model_name, key, family, position), family)
        self._trials.measure(job, family, position, rank, window, ran)

    def order(self, names: Iterable[str]) -> None:
        """Note the order in which tensors became ready in some model: spans do not say in which.

        A name counts for every family that has such a tensor and is still being tuned; unknown
        names are dropped.
        """
        names = list(dict.fromkeys(names))
        tuned = self._store.families_being_tuned(self._clock() - SPAN_SECONDS)
        known: dict[str, frozenset[str]] = {}
        for key, job_id in tuned.items():
            known[key] = self._names.get(key) or frozenset(
                tensor.name for tensor in self._store.tensors(job_id)
            )
            new = [name for name in names if name in known[key]]
            if new:
                self._store.extend_order(key, new)
        self._names = known

    def _enter(self, model_name: str, key: str, family: Family, rank: int, iteration: int) -> Job:
        """Note that the rank begins; return the family's first job, whose default it gets."""
        now = self._clock()
        after = storage.update(self._store, key, lambda f: f.entered(rank, iteration, now))
        job = self._heard_of(self._directory.job(model_name, key, after), after)
        if family.names and not after.names:
            logger.info("job %s: its ranks start again with the default; tuning goes on", job.id)
        return job

    def _heard_of(self, job: Job, family: Family) -> Job:
        """Store the job's last contact, and the number of its ranks if no world size is known."""
        now = self._clock()
        if job.is_lost:
            self._store.resume_job(job.id, now)
        elif now - job.last_contact_at >= CONTACT_SECONDS:
            self._store.touch(job.id, now)
        if self._world_size is None and job.world_size < len(family.present):
            self._store.widen(job.id, len(family.present))
        return job

    def _warn_apart(self, job: Job, family: Family) -> None:
        places = family.stragglers(self._world_size)
        behind = [f"rank {rank} at iteration {at}" for rank, at in places.items() if at >= 0]
        missing = [f"rank {rank} has not reported" for rank, at in places.items() if at < 0]
        told = [*behind[:MOST_RANKS_TOLD], *missing[:MOST_RANKS_TOLD]]
        if len(told) < len(places):
            told.append(f"{len(places)} in all")
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
