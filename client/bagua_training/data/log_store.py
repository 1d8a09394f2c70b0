"""A store in one file: what is written is appended, and found by a table of hashes.

The file begins with a header (how far it is used, how many keys it has) and a table of offsets, one
for each value of a hash. Each record has the offset of the one before it with the same hash. A
record is complete before the table has its offset, so readers need no lock.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from bagua_training.data.node import available_memory_bytes, free_disk_bytes, share_on_node
from bagua_training.data.shared_file import SharedFile
from bagua_training.data.store import Store

logger = logging.getLogger(__name__)

MAGIC = b"bagua-1\n"
HEADER = struct.Struct("<8sQQ")  # MAGIC, where the next record begins, the number of keys
OFFSET = struct.Struct("<Q")
RECORD = struct.Struct("<QIIQ")  # the offset before, the checksum, bytes of the key and the value
TABLE_ENTRIES = 1 << 20
"""8 MiB; with ten million keys a look-up passes five others."""
TABLE = 64
RECORDS = TABLE + TABLE_ENTRIES * OFFSET.size


class Found(NamedTuple):
    """A record.

    Attributes:
        offset: where it begins.
        head: all of it but the value.
        length: of the value, in bytes.
    """

    offset: int
    head: bytes
    length: int
    checksum: int


class LogStore(Store):
    """Keeps what it has when it is full, and takes no more.

    An epoch reads each sample once. So a cache for a part of the samples answers for just that part
    if it keeps them, and for less if each new sample drops one that is still to be read.

    Args:
        capacity_bytes: of the file.
        is_checked: a checksum tells values that a crash of the machine left torn on a disk.
    """

    def __init__(self, file: SharedFile, capacity_bytes: int, is_checked: bool = False) -> None:
        self._file = file
        self._capacity_bytes = capacity_bytes
        self._is_checked = is_checked
        self._is_full = False
        with file.locked():
            if file.read(len(MAGIC), 0) != MAGIC:
                self._format()

    @property
    def address(self) -> str:
        """The address of the file in memory, for the other ranks of the node."""
        return self._file.address

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self._value(key.encode()) for key in keys]

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        with self._file.locked():
            for key, value in dictionary.items():
                self._append(key.encode(), value)

    def num_keys(self) -> int:
        return self._header()[1]

    def clear(self) -> None:
        with self._file.locked():
            self._format()

    def status(self) -> bool:
        return self._file.read(len(MAGIC), 0) == MAGIC

    def shutdown(self) -> None:
        """Do nothing: nothing runs that could be ended."""

    def _header(self) -> tuple[int, int]:
        _, end, keys = HEADER.unpack(self._file.read(HEADER.size, 0))
        return end, keys

    def _format(self) -> None:
        self._file.resize(0)
        self._file.resize(RECORDS)
        self._file.write(HEADER.pack(MAGIC, RECORDS, 0), 0)
        self._is_full = False

    def _value(self, key: bytes) -> bytes | None:
        found = self._find(key)
        if found is None:
            return None
        value = self._file.read(found.length, found.offset + len(found.head))
        # A record that ``clear`` dropped meanwhile is overwritten from its beginning on.
        if self._file.read(len(found.head), found.offset) != found.head:
            return None
        return value if self._checksum(value) == found.checksum else None

    def _checksum(self, value: bytes) -> int:
        return zlib.crc32(value) if self._is_checked else 0

    def _find(self, key: bytes) -> Found | None:
        offset = self._newest(_entry(key))
        while offset:
            record = self._file.read(RECORD.size + len(key), offset)
            if len(record) < RECORD.size:
                return None
            before, checksum, key_length, length = RECORD.unpack_from(record)
            if key_length == len(key) and record[RECORD.size :] == key:
                return Found(offset, record, length, checksum)
            if before >= offset:
                return None  # Overwritten: older records stand before newer ones.
            offset = before
        return None

    def _newest(self, entry: int) -> int:
        """The offset of the newest record whose key has that hash; 0: there is none."""
        return int.from_bytes(self._file.read(OFFSET.size, entry), "little")

    def _append(self, key: bytes, value: bytes) -> None:
        if self._value(key) == value:
            return  # Another process loaded the same sample at the same time.
        is_new = self._find(key) is None
        end, keys = self._header()
        entry = _entry(key)
        header = RECORD.pack(self._newest(entry), self._checksum(value), len(key), len(value))
        record = header + key + value
        if end + len(record) > self._capacity_bytes:
            self._tell_full(keys)
            return
        self._file.write(record, end)
        # In this order: whoever dies in between leaves a gap, and no record that is overwritten.
        self._file.write(HEADER.pack(MAGIC, end + len(record), keys + is_new), 0)
        self._file.write(OFFSET.pack(end), entry)

    def _tell_full(self, keys: int) -> None:
        if not self._is_full:
            logger.warning(
                "cache: full with %d samples in %.1f MiB; other samples are loaded each time. "
                "A larger capacity_per_node has room for more",
                keys,
                self._capacity_bytes / 2**20,
            )
        self._is_full = True


def memory_of_node(capacity_per_node: int | None = None) -> LogStore:
    """Return a store in the memory of this node, for all of its ranks; one for each process's life.

    All ranks must call it. It is no part of ``/dev/shm``, so that folder's size does not bound it.

    Args:
        capacity_per_node: in bytes; None: half of what is available. What the first call says.

    Raises:
        OSError: this rank cannot open what the first rank of its node made.
    """
    capacity = capacity_per_node or available_memory_bytes() // 2
    made: list[LogStore] = []

    def make() -> str:
        made.append(LogStore(SharedFile(), capacity))
        return f"{capacity} {made[0].address}"

    node = share_on_node("memory", make)
    if "memory" not in _kept:
        told, address = node.own.split()
        _kept["memory"] = made[0] if made else LogStore(_opened(address), int(told))
    return _kept["memory"]


def _opened(address: str) -> SharedFile:
    try:
        return SharedFile(address)
    except OSError as error:
        raise OSError(
            f"this rank cannot open the memory that its node's first rank made for the cache: "
            f'{error}. If they are in containers of their own, use backend="redis"'
        ) from error


_kept: dict[str, LogStore] = {}
"""The file in memory lives as long as somebody has it open."""


def disk(
    folder: str | Path, name: str, version: str, capacity_per_node: int | None = None
) -> LogStore:
    """Return a store in a file of this folder, which all jobs of this machine can use, at once or
    later.

    Files of other versions of the same dataset are removed; a job that still uses one keeps it to
    its end.

    Args:
        folder: of a disk of this machine, not of a network's. Made if need be.
        capacity_per_node: in bytes; None: half of what is free.

    Raises:
        OSError: the folder or the file cannot be written, or can be by other users.
    """
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    beginning = f"{quote(name, safe='')}@"
    path = folder / f"{beginning}{quote(version, safe='')}.samples"
    for other in folder.iterdir():
        if other.name.startswith(beginning) and other.suffix == ".samples" and other != path:
            other.unlink(missing_ok=True)
    file = SharedFile(path=path)
    room = file.size_bytes + free_disk_bytes(folder)
    return LogStore(file, capacity_per_node or room // 2, is_checked=True)


def _entry(key: bytes) -> int:
    """Return where the table has the offset for this key."""
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return TABLE + int.from_bytes(digest, "little") % TABLE_ENTRIES * OFFSET.size
