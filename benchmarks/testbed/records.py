"""What runs have made, written down before it is made, so that it can be removed by anybody.

One file for each run in ``/run/bagua-testbed`` (where that cannot be written, in the folder
for temporary files). Nothing is ever removed that is not written there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from platformdirs import user_cache_path

from .tools import ToolError, run

PREFIX = "bagua-testbed"
KILL_SECONDS = 10.0


def folder() -> Path:
    """Where the records are; of this user only."""
    if os.access("/run", os.W_OK):
        path = Path("/run") / PREFIX
    else:
        path = Path(tempfile.gettempdir()) / f"{PREFIX}-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise ToolError(f"{path} belongs to somebody else")
    return path


def started(pid: int) -> str | None:
    """When the process began, in clock ticks since the machine did; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        owner, owner_started: its process; a number alone would be given again.
        namespaces: names of those that it makes, all with the run's identifier in them.
        folder: for temporary files of its processes; in the user's cache.
    """

    run: str
    owner: int
    owner_started: str
    network: str
    namespaces: list[str]
    folder: str

    @classmethod
    def create(cls, network: str, hosts: list[str]) -> Record:
        """Write the record of a new run of this process."""
        identifier = secrets.token_hex(4)
        record = cls(
            identifier,
            os.getpid(),
            started(os.getpid()) or "",
            network,
            [f"{PREFIX}-{identifier}-{host}" for host in hosts],
            str(user_cache_path("bagua-autotune") / "testbed" / identifier),
        )
        with alone():
            record.path.write_text(json.dumps(asdict(record)))
        Path(record.folder).mkdir(parents=True)
        return record

    @property
    def path(self) -> Path:
        return folder() / f"{self.run}.json"

    @property
    def owner_alive(self) -> bool:
        return started(self.owner) == self.owner_started

    def processes(self) -> list[int]:
        """Those that run in its namespaces."""
        return [
            int(pid)
            for namespace in set(self.namespaces).intersection(namespaces())
            for pid in run("ip", "netns", "pids", namespace).split()
        ]

    def remove(self) -> None:
        """End its processes, and remove its namespaces with their links, its files and itself.

        Raises:
            ToolError: a process did not end, or ``ip`` refused.
        """
        with alone():
            self._remove()

    def _remove(self) -> None:
        deadline = time.monotonic() + KILL_SECONDS
        while pids := self.processes():
            if time.monotonic() > deadline:
                raise ToolError(f"run {self.run}: processes {pids} do not end")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for namespace in set(self.namespaces).intersection(namespaces()):
            run("ip", "netns", "delete", namespace)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process at a time writes and removes records, and what they tell of."""
    directory = os.open(folder(), os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def namespaces() -> list[str]:
    """Names of all network namespaces of the machine."""
    if shutil.which("ip") is None:
        return []
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line]


def records() -> Iterator[Record]:
    """Of all runs that have not been removed."""
    for path in sorted(folder().glob("*.json")):
        # Just removed, or just being written, or its run was killed in between.
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            yield Record(**json.loads(path.read_text()))


def clean(also_of_the_living: bool = False) -> list[Record]:
    """Remove what runs left whose process is gone, or all of it; returns what was removed.

    Raises:
        ToolError: a process did not end, or ``ip`` refused.
    """
    with alone():
        for path in folder().glob("*.json"):
            if path.stat().st_size == 0:  # nobody is writing it now: killed, and nothing was made
                path.unlink()
        removed = [record for record in records() if also_of_the_living or not record.owner_alive]
        for record in removed:
            record._remove()
    return removed
