"""Families as this process knows them, by the names that ranks use.

What is remembered may be old, as another replica may have changed it: so nothing is stored but by a
statement that compares the revision. Where that fails, the family is read again and the change made
anew.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from bagua_autotune.bagua.family import Family
from bagua_autotune.store import Heard, Store, StoredFamily
from bagua_autotune.store.errors import NoAnswer

Item = TypeVar("Item")
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


class Change(NamedTuple):
    """What a request makes of a family, and which of its models it is about."""

    family: Family
    position: int


class Changed(NamedTuple):
    """A family before and after a request, and what is stored of the model's job."""

    before: Known
    family: Family
    position: int
    job: Heard


class Storage:
    """Families in the store. Methods with an alias raise NotRegistered if it means none."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._guard = threading.Lock()
        self._keys: OrderedDict[str, str] = OrderedDict()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()

    def register(self, alias: str, key: str, new: Family) -> Family:
        """Bind the alias to the family of this key, which is created as ``new`` if there is none;
        the family."""
        self._store.add_family(alias, key, new.model_dump(mode="json"))
        return self.load(key)

    def key_of(self, alias: str) -> str | None:
        """The key of the family that the alias means."""
        found = self._store.family_of(alias)
        return found.key if found else None

    def load(self, key: str) -> Family:
        """A family as it is stored; UnknownFamily if there is none of this key."""
        return self._remember(self._store.family(key)).family

    def find(self, alias: str) -> Known:
        """The family that the alias means, as it is stored."""
        found = self._store.family_of(alias)
        if found is None:
            raise NotRegistered(alias.partition("/")[2])
        with self._guard:
            _keep(self._keys, alias, found.key, NAMES_KEPT)
        return self._remember(found)

    def change(self, alias: str, make: Callable[[Known], Change]) -> Changed:
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
                job = self._store.replace_family(*row, content, job_id)
                if job is not None:
                    after = known._replace(revision=known.revision + 1, family=family)
                    self._slot(known.key).known = after
                    return Changed(known, family, position, job)
                if attempt:
                    time.sleep(PAUSE_SECONDS * (attempt % 8))
                known = self.find(alias)
        finally:
            if in_turn:
                slot.turn.release()
        raise NoAnswer(f"family {key} was changed by others {MOST_TRIES} times")

    def _remember(self, found: StoredFamily) -> Known:
        slot = self._slot(found.key)
        known = slot.known
        if known is None or known.revision != found.revision:
            family = Family.model_validate_json(found.data)
            known = Known(found.key, found.revision, family, json.loads(found.ready_order))
            slot.known = known
        return known

    def _slot(self, key: str) -> _Slot:
        with self._guard:
            slot = self._slots.get(key) or _Slot()
            _keep(self._slots, key, slot, FAMILIES_KEPT)
            return slot


class _Slot:
    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.known: Known | None = None


def _keep(kept: OrderedDict[str, Item], name: str, item: Item, most: int) -> None:
    kept[name] = item
    kept.move_to_end(name)
    while len(kept) > most:
        kept.popitem(last=False)
