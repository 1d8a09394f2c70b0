"""How often a cache had what was asked for, counted by all processes that use it."""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from bagua_client.data.shared_file import SharedFile

SLOT = struct.Struct("<QQ")  # hits, misses


class CacheStatistics(NamedTuple):
    """How often a cache was asked, and how often it had the value.

    Attributes:
        hits: values that it had.
        misses: values that were loaded.
    """

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """The share of hits in all that was asked for; 0 if nothing was."""
        return self.hits / max(self.hits + self.misses, 1)


class Counters:
    """Counters, with a slot for each process, so that none waits for another."""

    def __init__(self) -> None:
        self._file = SharedFile()
        self._process = 0

    def count(self, hit: bool) -> None:
        if self._process != os.getpid():
            self._begin()
        if hit:
            self._hits += 1
        else:
            self._misses += 1
        self._file.write(SLOT.pack(self._hits, self._misses), self._offset)

    def statistics(self) -> CacheStatistics:
        slots = SLOT.iter_unpack(self._file.read(self._file.size_bytes, 0))
        return CacheStatistics(*(sum(each) for each in zip((0, 0), *slots, strict=True)))

    def _begin(self) -> None:
        self._process, self._hits, self._misses = os.getpid(), 0, 0
        with self._file.locked():
            self._offset = self._file.size_bytes
            self._file.resize(self._offset + SLOT.size)
