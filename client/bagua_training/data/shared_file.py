"""A file that several processes write to, in memory or on disk."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
            self.descriptor, self._token = _opened(address)
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


def _opened(address: str) -> tuple[int, str]:
    process, number, token = address.split(":")
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    # In another container the same numbers are another process's.
    if token not in os.readlink(f"/proc/self/fd/{descriptor}"):
        os.close(descriptor)
        raise FileNotFoundError(f"process {process} has no file in memory of that name")
    return descriptor, token
