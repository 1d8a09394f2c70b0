"""Which family a worker means by a model's name, and the jobs of a family's models."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.job import Job, JobSpec, Limits
from bagua_autotune.store import JobConflict, UnknownJob, families
from bagua_autotune.tuning.bagua import hyperparameters
from bagua_autotune.tuning.bagua.family import Family
from bagua_autotune.tuning.bagua.names import family_key, stem
from bagua_autotune.tuning.tuner import Tuner

logger = logging.getLogger(__name__)

LONGEST_LABEL = 31


class NotRegistered(Exception):
    """No worker has registered a model of this name."""


class Directory:
    """Finds and creates families and their jobs.

    A service started with another world size knows other families: what was tuned for another
    number of ranks is nothing to these.

    Args:
        limits: of every job created.
        world_size: of every job created; None if it is not known.
        clock: seconds since the epoch.
    """

    def __init__(
        self, tuner: Tuner, limits: Limits, world_size: int | None, clock: Callable[[], float]
    ) -> None:
        self._tuner = tuner
        self._store = tuner.store
        self._limits = limits
        self._world_size = world_size
        self._clock = clock

    def register(
        self, model_name: str, tensors: Sequence[Tensor], default_bucket_bytes: int
    ) -> Job:
        """The job of the first model of the name's family, both created if need be.

        Under a name given by the user, other tensors or another default than before are another
        model: its job ends and the new one takes its place.
        """
        key = family_key(model_name, tensors, self._world_size, default_bucket_bytes)
        before = families.resolve(self._store, self._alias(model_name))
        label = re.sub(r"[^A-Za-z0-9_-]+", "-", stem(model_name))[:LONGEST_LABEL]
        baseline = hyperparameters.baseline(default_bucket_bytes)
        new = Family.new(label, baseline, self._clock()).model_dump(mode="json")
        families.register(self._store, self._alias(model_name), key, new)
        job = self._first_job(model_name, key, tensors, default_bucket_bytes)
        if before not in (None, key) and stem(model_name) == model_name:
            self._replace(str(before), job)
        return job

    def key(self, model_name: str) -> str:
        """The family that the name means.

        Raises:
            NotRegistered: nobody registered the name.
        """
        key = families.resolve(self._store, self._alias(model_name))
        if key is None:
            raise NotRegistered(model_name)
        return key

    def job(self, model_name: str, key: str, family: Family, position: int = 0) -> Job:
        """The job of one of the family's models, created if it is a further one.

        Raises:
            NotRegistered: the family's first job is gone, and with it the tensors.
        """
        job_id = family.models[position].job_id
        try:
            return self._store.job(job_id)
        except UnknownJob:
            pass
        try:
            first = self._store.job(family.models[0].job_id)
            tensors = self._store.tensors(first.id)
        except UnknownJob:
            raise NotRegistered(model_name) from None
        default_bucket_bytes = first.baseline.number("bucket_bytes")
        return self._create(job_id, first.name, key, tensors, default_bucket_bytes)

    def _first_job(
        self, model_name: str, key: str, tensors: Sequence[Tensor], default_bucket_bytes: int
    ) -> Job:
        data, _ = families.load(self._store, key)
        job_id = Family.model_validate(data).models[0].job_id
        try:
            job = self._store.job(job_id)
        except UnknownJob:
            return self._create(job_id, stem(model_name), key, tensors, default_bucket_bytes)
        if job.ended_at is None:
            return job
        self._store.resume_job(job_id, self._clock())
        return self._store.job(job_id)

    def _create(
        self, job_id: str, name: str, key: str, tensors: Sequence[Tensor], default_bucket_bytes: int
    ) -> Job:
        world_size = self._world_size or 1
        spec = JobSpec(
            name=name,
            world_size=world_size,
            ranks_per_node=(world_size,),
            tensors=tuple(tensors),
            knobs=dict(hyperparameters.space(default_bucket_bytes)),
            default_configuration=dict(hyperparameters.baseline(default_bucket_bytes)),
            fingerprint=key,
            limits=self._limits,
            software={"protocol": "Bagua 0.9"},
        )
        with suppress(JobConflict):  # made at the same moment, by a rank that orders otherwise
            self._tuner.register(job_id, spec, "v1", {"family": key})
        return self._store.job(job_id)

    def _replace(self, key: str, successor: Job) -> None:
        data, _ = families.load(self._store, key)
        for model in Family.model_validate(data).models:
            try:
                self._store.end_job(model.job_id, self._clock())
            except UnknownJob:
                continue
            logger.info(
                "job %s: registered with other tensors, job %s replaces it",
                model.job_id,
                successor.id,
            )

    def _alias(self, model_name: str) -> str:
        # Services of other world sizes on the same database have models of the same names.
        return f"{self._world_size or 'any'}/{model_name}"
