"""Which job a worker means by its model name.

A registration carries no rank, and by default every process has names of its own.  So a job is
found by its family (the name without an address, and the tensors), and a name is bound to one
of the family's jobs when a rank first uses it: a rank's k-th name of a family is the family's
k-th job.  Twin models in one process stay two jobs, and ranks that create them in the same
order agree on which is which.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.job import Job, JobSpec, Limits
from bagua_autotune.store import ranks
from bagua_autotune.tuning.bagua import hyperparameters
from bagua_autotune.tuning.bagua.names import digest, family, stem
from bagua_autotune.tuning.bagua.state import BaguaState, first_grant
from bagua_autotune.tuning.tuner import Tuner

# Whose alias a registered name is: nobody's in particular (ranks count from 0).
ANY_RANK = -1


class NotRegistered(Exception):
    """No worker has registered a model of this name."""


class Directory:
    """Finds and creates the jobs of Bagua workers.

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
        self._lock = threading.Lock()

    def register(
        self, model_name: str, tensors: Sequence[Tensor], default_bucket_bytes: int
    ) -> Job:
        """The first job of the model's family, created if there is none.

        Under a name given by the user, other tensors than before are another model: its job
        ends and the new one takes its place.
        """
        kin = family(model_name, tensors)
        with self._lock:
            before = self._aliased(model_name, ANY_RANK)
            job = next(iter(self._members(kin)), None)
            if job is None:
                job = self._create(stem(model_name), kin, tensors, default_bucket_bytes)
            ranks.add_alias(self._store, model_name, ANY_RANK, job.id)
            if before and before.id != job.id and stem(model_name) == model_name:
                self._store.end_job(before.id, self._clock())
            return job

    def find(self, model_name: str, rank: int) -> Job:
        """The job that a rank means by a name, which is bound to it at the first use.

        Raises:
            NotRegistered: nobody registered the name.
        """
        with self._lock:
            first = self._aliased(model_name, ANY_RANK)
            if first is None:
                raise NotRegistered(model_name)
            kin = BaguaState.of(first.data).family
            bound = self._aliased(model_name, rank)
            if bound and bound.ended_at is None and BaguaState.of(bound.data).family == kin:
                return bound
            for job in self._members(kin):
                if self._bind(job, model_name, rank):
                    return job
            default = int(first.baseline["bucket_bytes"])
            twin = self._create(first.name, kin, self._store.tensors(first.id), default)
            self._bind(twin, model_name, rank)
            return twin

    def _aliased(self, model_name: str, rank: int) -> Job | None:
        job_id = ranks.resolve_alias(self._store, model_name, rank)
        return self._store.job(job_id) if job_id else None

    def _members(self, kin: str) -> list[Job]:
        """The family's jobs that have not ended, oldest first."""
        jobs = map(self._store.job, ranks.jobs_with(self._store, "family", kin))
        return [job for job in jobs if job.ended_at is None]

    def _bind(self, job: Job, model_name: str, rank: int) -> bool:
        """Let the rank's name mean the job, unless another name of the rank does already."""

        def bind(data: ranks.Data) -> ranks.Data:
            return BaguaState.of(data).binding(rank, model_name).model_dump(mode="json")

        data = ranks.update_data(self._store, job.id, bind)
        if BaguaState.of(data).bound[rank] != model_name:
            return False
        ranks.add_alias(self._store, model_name, rank, job.id)
        return True

    def _create(
        self, name: str, kin: str, tensors: Sequence[Tensor], default_bucket_bytes: int
    ) -> Job:
        position = len(ranks.jobs_with(self._store, "family", kin)) + 1
        # Made from the content, so that two replicas that create it at once create one job.
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:40]
        job_id = f"{readable}-{digest(kin)[:12]}-{position}"
        baseline = hyperparameters.baseline(default_bucket_bytes)
        spec = JobSpec(
            name=name,
            world_size=self._world_size or 1,
            ranks_per_node=(self._world_size or 1,),
            tensors=tuple(tensors),
            knobs=dict(hyperparameters.space(default_bucket_bytes)),
            default_configuration=dict(baseline),
            fingerprint=digest(kin),
            limits=self._limits,
            software={"protocol": "Bagua 0.9"},
        )
        state = BaguaState(family=kin, grants=[first_grant(baseline, self._clock())])
        self._tuner.register(job_id, spec, "v1", state.model_dump(mode="json"))
        return self._store.job(job_id)
