"""What a cache keeps its samples in: keys and bytes, shared by the processes of a job."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence


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
        # Python's own hash() differs from process to process.
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self.stores)
