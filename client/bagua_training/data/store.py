"""What a cache keeps its samples in: keys and bytes, shared by the processes of a job; and a store
that is written to in batches, and that a training can do without."""

from __future__ import annotations

import hashlib
import logging
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

OLDEST_SECONDS = 1.0
"""A value is not kept from other processes for longer, while this one reads."""
MOST_BYTES = 64 << 20
"""The most bytes of values that are kept back; once reached, all are written, however few."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


class Store(ABC):
    """A key-value store; all methods but ``status`` raise where it cannot be reached."""

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, in place of an earlier one of that key."""
        self.mset({key: value})

    def get(self, key: str) -> bytes | None:
        """The key's value; None: there is none, or it was dropped to make room."""
        return self.mget([key])[0]

    @abstractmethod
    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        """Keep several values at once."""

    @abstractmethod
    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The keys' values, in the order of the keys."""

    @abstractmethod
    def num_keys(self) -> int: ...

    @abstractmethod
    def clear(self) -> None:
        """Drop all values, whoever wrote them."""

    @abstractmethod
    def status(self) -> bool:
        """Whether it can be reached."""

    @abstractmethod
    def shutdown(self) -> None:
        """End what this process started for it. What others started stays."""


class ClusterStore(Store):
    """Several stores as one: each key is in one of them, the same one for all processes.

    Raises:
        ValueError: there are no stores.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("a ClusterStore needs at least one store")
        self.stores = list(stores)

    def route(self, key: str) -> Store:
        """The store that has the key."""
        return self.stores[self._number(key)]

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        parts: dict[int, dict[str, bytes]] = {}
        for key, value in dictionary.items():
            parts.setdefault(self._number(key), {})[key] = value
        for number, part in parts.items():
            self.stores[number].mset(part)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        parts: dict[int, list[str]] = {}
        for key in keys:
            parts.setdefault(self._number(key), []).append(key)
        found: dict[str, bytes | None] = {}
        for number, part in parts.items():
            found.update(zip(part, self.stores[number].mget(part), strict=True))
        return [found[key] for key in keys]

    def num_keys(self) -> int:
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        for store in self.stores:
            store.clear()

    def status(self) -> bool:
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        for store in self.stores:
            store.shutdown()

    def _number(self, key: str) -> int:
        return number_of(key.encode(), len(self.stores))


def number_of(key: bytes, numbers: int) -> int:
    """Return one of so many numbers for a key; Python's own hash() differs from process to
    process.
    """
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % numbers


class BufferedStore:
    """Never raises because of its store, and never keeps more than ``size`` values back, nor more
    than ``MOST_BYTES`` and one value.

    While the store cannot be reached, values are not found and not kept, and it is tried again
    after a pause, which doubles; each process says once that it is away, and once that it is back.
    A process of ``multiprocessing``, as DataLoader's workers are, writes its last values when it
    ends, and each process before it forks or starts others that use the store.

    Args:
        size: so many values are written at once.

    Raises:
        ValueError: ``size`` is below 1.
    """

    _pending: dict[str, bytes]

    def __init__(self, store: Store, size: int) -> None:
        if size < 1:
            raise ValueError(f"writer_buffer_size must be at least 1, not {size}")
        self.store = store
        self._size = size
        self._process = 0
        _living.add(self)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The keys' values; None: there is none, or the store is away."""
        self._begin()
        if self._pending and time.monotonic() - self._pending_since > OLDEST_SECONDS:
            self.flush()
        found: dict[str, bytes | None] = {**self._pending}  # Another thread may write them now.
        asked = [key for key in keys if key not in found]
        if asked:
            values = self._attempt(lambda: self.store.mget(asked))
            found.update(zip(asked, values or [None] * len(asked), strict=True))
        return [found[key] for key in keys]

    def put(self, key: str, value: bytes) -> None:
        self._begin()
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending_bytes += len(value) - len(self._pending.get(key, b""))
        self._pending[key] = value
        if len(self._pending) >= self._size or self._pending_bytes >= MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is kept back; what cannot be written is forgotten, and loaded again."""
        self._begin()
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        if pending:
            self._attempt(lambda: self.store.mset(pending))

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return {"store": self.store, "size": self._size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        BufferedStore.__init__(self, **state)

    def _begin(self) -> None:
        """Begin anew in each process: a fork has its parent's values, which the parent writes."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._pending, self._pending_bytes = {}, 0
        self._pending_since = 0.0
        self._failures, self._away_until = 0, 0.0
        # A worker's end runs these, and none of atexit's; its start drops what is there already.
        util.Finalize(None, _flush_living, args=(weakref.ref(self),), exitpriority=10)

    def _attempt(self, action: Callable[[], Result]) -> Result | None:
        if self._failures and time.monotonic() < self._away_until:
            return None
        try:
            result = action()
        except Exception as error:
            pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 10), LONGEST_PAUSE_SECONDS)
            self._away_until = time.monotonic() + pause
            if not self._failures:
                logger.warning(
                    "cache: it cannot be used: %s. Samples are loaded until it is back", error
                )
            self._failures += 1
            return None
        if self._failures:
            logger.warning("cache: it is back")
            self._failures = 0
        return result


_living: weakref.WeakSet[BufferedStore] = weakref.WeakSet()


def _flush_before_fork() -> None:
    for buffered in list(_living):
        if buffered._process == os.getpid():
            buffered.flush()


os.register_at_fork(before=_flush_before_fork)


def _flush_living(reference: weakref.ref[BufferedStore]) -> None:
    if (buffered := reference()) is not None:
        buffered.flush()
