"""Finds the family that a worker means by a model's name, and the jobs of a family's models; and
keeps families as this process knows them, by the names that ranks use.

By default Bagua names a model ``<class>_<id(module)>``: another name in every process, and so
another model for every rank. Here the number is cut off, and what remains is one job.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from bagua_autotune.model.job import Job, JobSpec, Limits
from bagua_autotune.store import Store
from bagua_autotune.store.errors import JobConflict, NoAnswer, UnknownJob
from bagua_autotune.store.families import Heard
from bagua_autotune.tuning.tuner import Tuner
from bagua_v1 import hyperparameters
from bagua_v1.family import Family
from bagua_wire.cutting import Tensor

FAMILIES_KEPT = 1024
NAMES_KEPT = 16_384
# Who waits so long for the others of this process goes on beside them.
TURN_SECONDS = 2.0
MOST_TRIES = 200
PAUSE_SECONDS = 0.005


class NotRegistered(Exception):
    """Raised where no worker has registered a model of this name."""


class Known(NamedTuple):
    """A family, and its ready order, at a revision."""

    key: str
    revision: int
    family: Family
    order: list[str]


class Changed(NamedTuple):
    """A family before and after a request, the model that it was about, and what is stored of that
    model's job."""

    before: Known
    after: Known
    position: int
    job: Heard


# What a request makes of a family, and which of its models it is about.
Change = Callable[[Known], tuple[Family, int]]


class Storage:
    """Families in the store. Methods with an alias raise NotRegistered if it means none.

    What is remembered may be old, as another replica may have changed it: so nothing is stored but
    by a statement that compares the revision. Where that fails, the family is read again and the
    change made anew.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys: dict[str, str] = {}
        self._slot = lru_cache(maxsize=FAMILIES_KEPT)(_Slot)

    def register(self, alias: str, key: str, new: Family) -> tuple[Known | None, Known]:
        """Bind the alias to the family of this key, which is created as ``new`` if there is none.

        Returns:
            What the alias meant before, and what it means now.
        """
        before = self.known(alias)
        self._store.families.add(alias, key, new.model_dump(mode="json"))
        return before, self.find(alias)

    def find(self, alias: str) -> Known:
        """The family that the alias means, as it is stored."""
        found = self.known(alias)
        if found is None:
            raise NotRegistered(alias.partition("/")[2])
        return found

    def known(self, alias: str) -> Known | None:
        """The family that the alias means, as it is stored; None if it means none."""
        found = self._store.families.named(alias)
        if found is None:
            return None
        if len(self._keys) >= NAMES_KEPT:
            self._keys.clear()
        self._keys[alias] = found.key
        slot = self._slot(found.key)
        known = slot.known
        if known is None or known.revision != found.revision:
            family, order = Family.model_validate_json(found.data), json.loads(found.ready_order)
            slot.known = known = Known(found.key, found.revision, family, order)
        return known

    def change(self, alias: str, make: Change) -> Changed:
        """Store what a request makes of the family that the alias means. It may be made several
        times, of what is stored at last.

        Raises:
            NoAnswer: others changed the family all the time.
        """
        key = self._keys.get(alias) or self.find(alias).key
        slot = self._slot(key)
        in_turn = slot.turn.acquire(timeout=TURN_SECONDS)
        try:
            known = slot.known or self.find(alias)
            for attempt in range(MOST_TRIES):
                family, position = make(known)
                content, job_id = family.model_dump_json(), family.models[position].job_id
                row = alias, known.key, known.revision
                job = self._store.families.replace(*row, content, job_id)
                if job is not None:
                    after = known._replace(revision=known.revision + 1, family=family)
                    self._slot(known.key).known = after
                    return Changed(known, after, position, job)
                if attempt:
                    time.sleep(PAUSE_SECONDS * (attempt % 8))
                known = self.find(alias)
        finally:
            if in_turn:
                slot.turn.release()
        raise NoAnswer(f"family {key} was changed by others {MOST_TRIES} times")


class _Slot:
    """What this process knows of the family of a key, and whose turn it is to change it."""

    def __init__(self, _key: str) -> None:
        self.turn = threading.Lock()
        self.known: Known | None = None


logger = logging.getLogger(__name__)

LONGEST_LABEL = 31
# id() is an address: on 64-bit systems CPython's objects have addresses of 12 digits (39 bits) to
# 15 (48 bits).  Versions, dates and times in seconds are shorter, so they are not cut off.
_ADDRESS = re.compile(r"(.+)_[1-9]\d{11,14}")


class Directory:
    """Finds and creates families and their jobs.

    A service started with another world size has other families: a result for another number of
    ranks does not help them.

    Args:
        limits: of every job created.
        world_size: of every job created; None if it is not known.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        tuner: Tuner,
        storage: Storage,
        limits: Limits,
        world_size: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._tuner = tuner
        self._store = tuner.store
        self._storage = storage
        self._limits = limits
        self._world_size = world_size
        self._clock = clock

    def register(
        self, model_name: str, tensors: Sequence[Tensor], default_bucket_bytes: int
    ) -> Job:
        """The job of the first model of the name's family; both are created if needed.

        If the user gave the name, other tensors or another default mean another model: the old
        job ends and a new one takes its place.
        """
        key = family_key(model_name, tensors, self._world_size, default_bucket_bytes)
        label = re.sub(r"[^A-Za-z0-9_-]+", "-", stem(model_name))[:LONGEST_LABEL]
        new = Family.new(label, hyperparameters.baseline(default_bucket_bytes), self._clock())
        before, known = self._storage.register(self.alias(model_name), key, new)
        job = self._first_job(model_name, known, tensors, default_bucket_bytes)
        if before and before.key != key and stem(model_name) == model_name:
            self._replace(before.family, job)
        return job

    def job(self, model_name: str, known: Known, position: int) -> Job:
        """The job of one of the family's models, created if it is a further model.

        Raises:
            NotRegistered: the family's first job was deleted, and the tensors with it.
        """
        job_id = known.family.models[position].job_id
        with suppress(UnknownJob):
            return self._store.jobs.get(job_id)
        try:
            first = self._store.jobs.get(known.family.models[0].job_id)
            tensors = self._store.jobs.tensors(first.id)
        except UnknownJob:
            raise NotRegistered(model_name) from None
        default_bucket_bytes = first.baseline.number("bucket_bytes")
        return self._create(job_id, first.name, known.key, tensors, default_bucket_bytes)

    def _first_job(
        self, model_name: str, known: Known, tensors: Sequence[Tensor], default_bucket_bytes: int
    ) -> Job:
        job_id = known.family.models[0].job_id
        try:
            job = self._store.jobs.get(job_id)
        except UnknownJob:
            return self._create(job_id, stem(model_name), known.key, tensors, default_bucket_bytes)
        if job.ended_at is None:
            return job
        self._store.jobs.resume(job_id, self._clock())
        return self._store.jobs.get(job_id)

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
        with suppress(JobConflict):  # another rank made it with its tensors in another order
            self._tuner.register(job_id, spec, "v1", {"family": key})
        return self._store.jobs.get(job_id)

    def _replace(self, family: Family, successor: Job) -> None:
        for model in family.models:
            try:
                self._store.jobs.end(model.job_id, self._clock())
            except UnknownJob:
                continue
            logger.info(
                "job %s: its model was registered again with other tensors; job %s replaces it",
                model.job_id,
                successor.id,
            )

    def alias(self, model_name: str) -> str:
        """What the store has for the name."""
        # Services of other world sizes on the same database have models of the same names.
        return f"{self._world_size or 'any'}/{model_name}"


def stem(model_name: str) -> str:
    """The name without a trailing ``_<address>``.

    >>> stem("DistributedDataParallel_V1_9_0_140234234234234")
    'DistributedDataParallel_V1_9_0'
    >>> stem("resnet_50")
    'resnet_50'
    """
    match = _ADDRESS.fullmatch(model_name)
    return match[1] if match else model_name


def family_key(
    model_name: str, tensors: Iterable[Tensor], world_size: int | None, default_bucket_bytes: int
) -> str:
    """A digest that is equal for two names of the same model.

    It covers the stem, the tensors in any order, and the knobs with their default.
    """
    facts = sorted((tensor.name, tensor.elements, tensor.dtype) for tensor in tensors)
    text = json.dumps([stem(model_name), world_size, default_bucket_bytes, facts])
    return hashlib.sha256(text.encode()).hexdigest()
