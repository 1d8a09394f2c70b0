"""Families as this process knows them, by the names that ranks use.

What is remembered may be old, as another replica may have changed it: so nothing is stored but by a
statement that compares the revision. Where that fails, the family is read again and the change made
anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from bagua_autotune.store import Store
from bagua_autotune.store.errors import NoAnswer
from bagua_autotune.store.families import Heard
from bagua_v1.family import Family

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
    """Families in the store. Methods with an alias raise NotRegistered if it means none."""

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
