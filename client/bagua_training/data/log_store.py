"""A store in one file: what is written is appended, and found by a table of hashes.

The file begins with a header (how far it is used, how many keys it has) and a table of offsets, one
for each value of a hash. Each record has the offset of the one before it with the same hash. A
record is complete before the table has its offset, so readers need no lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from bagua_training.data.node import available_memory_bytes, share_on_node
from bagua_training.data.store import Store, number_of

logger = logging.getLogger(__name__)

MAGIC = b"bagua-1\n"
HEADER = struct.Struct("<8sQQ")  # MAGIC, where the next record begins, the number of keys
OFFSET = struct.Struct("<Q")
RECORD = struct.Struct("<QIIQ")  # the offset before, the checksum, bytes of the key and the value
TABLE_ENTRIES = 1 << 20
"""8 MiB; with ten million keys a look-up passes five others."""
TABLE = 64
RECORDS = TABLE + TABLE_ENTRIES * OFFSET.size


class SharedFile:
    """A file without a name in memory, or one on disk; forked and spawned workers can use it.

    The one in memory is in no folder. Linux frees it when the last process that uses it has ended,
    in whatever way. Other processes of the same user open it by its ``address``.

    Args:
        address: of an existing file in memory.
        path: of a file on disk, which is made if need be; neither: a new file in memory.

    Raises:
        OSError: it cannot be opened. PermissionError: it is somebody else's; what a cache contains
            is unpickled, so whoever can write to it can run code in the training.
    """

    def __init__(self, address: str | None = None, path: Path | None = None) -> None:
        self._path = path
        if path is not None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self.descriptor = os.open(path, flags, 0o600)
            self._check_owner(path)
        elif address is not None:
            self.descriptor, self._token = _open_in_memory(address)
        else:
            self._token = secrets.token_hex(16)
            self.descriptor = os.memfd_create(f"bagua-{self._token}", os.MFD_CLOEXEC)
        self._mutex, self._process = threading.Lock(), os.getpid()

    @property
    def address(self) -> str:
        """Return the path by which another process opens the file while this one lives."""
        return f"{os.getpid()}:{self.descriptor}:{self._token}"

    def __reduce__(self) -> tuple[type[SharedFile], tuple[str | None, Path | None]]:
        return SharedFile, (None if self._path else self.address, self._path)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes and threads out of the block; one that dies inside leaves it."""
        if self._process != os.getpid():  # Some thread may have held it when we were forked.
            self._mutex, self._process = threading.Lock(), os.getpid()
        with self._mutex:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def read(self, count: int, offset: int) -> bytes:
        """Read at most so many bytes; fewer at the file's end."""
        return os.pread(self.descriptor, count, offset)

    def write(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:  # Linux writes at most 2 GiB at once, and what a full disk has room for.
            written = os.pwrite(self.descriptor, view, offset)
            view, offset = view[written:], offset + written

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    def resize(self, size_bytes: int) -> None:
        os.ftruncate(self.descriptor, size_bytes)

    def _check_owner(self, path: Path) -> None:
        found = os.fstat(self.descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path} can be written by others than user {os.geteuid()}")


def _open_in_memory(address: str) -> tuple[int, str]:
    process, number, token = address.split(":")
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    # In another container the same numbers are another process's.
    if token not in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.close(descriptor)
        raise FileNotFoundError(f"process {process} has no file in memory of that name")
    return descriptor, token


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
    room = file.size_bytes + shutil.disk_usage(folder).free
    return LogStore(file, capacity_per_node or room // 2, is_checked=True)


def _entry(key: bytes) -> int:
    """Return where the table has the offset for this key."""
    return TABLE + number_of(key, TABLE_ENTRIES) * OFFSET.size
