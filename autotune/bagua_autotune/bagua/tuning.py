"""Bagua's four requests, carried out by the shared tuner.

A worker registers, asks at iteration 0, then reports and asks every 100 iterations.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from bagua_autotune.bagua import hyperparameters
from bagua_autotune.bagua.directory import Directory
from bagua_autotune.bagua.family import Family, Grant, Window
from bagua_autotune.bagua.storage import Changed, Known, Storage
from bagua_autotune.bagua.trials import Trials
from bagua_autotune.measuring.objective import bounded
from bagua_autotune.model.job import CONTACT_SECONDS, Job, Limits
from bagua_autotune.model.knobs import Configuration, Value
from bagua_autotune.model.layout import Tensor
from bagua_autotune.tuning.cache import Cache
from bagua_autotune.tuning.tuner import Tuner

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 10 * 1024**2
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
        world_size: int | None = None,
        default_bucket_bytes: int = DEFAULT_BUCKET_BYTES,
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
        self._tensors = lru_cache(maxsize=JOBS_AT_HAND)(self._store.tensors)
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
            self._store.resume_job(job.id, now)
        elif now - (last_contact_at or now) >= CONTACT_SECONDS:
            self._store.touch(job.id, now)
        if self._world_size is None and job.world_size < len(family.present):
            self._store.widen(job.id, len(family.present))
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
