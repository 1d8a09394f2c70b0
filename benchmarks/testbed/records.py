"""What runs have made, written down before it is made, so that it can be removed by anybody.

One file for each run in ``/run/bagua-testbed`` (of who is not root, in the folder for temporary
files). Nothing is ever removed that is not written there. What a run starts carries
its identifier in a variable, so that it is found on loopback as well.
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

from .rootless import user
from .tools import ToolError, run

PREFIX = "bagua-testbed"
RUN = "BAGUA_TESTBED_RUN"
NAMESPACES = Path("/run/netns")
"""Where iproute2 keeps a file for each that it made (ip-netns(8))."""
KILL_SECONDS = 10.0


def folder() -> Path:
    """Where the records are; of this user only."""
    if user() == 0:
        path = Path("/run") / PREFIX
    else:
        path = Path(tempfile.gettempdir()) / f"{PREFIX}-{user()}"
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

    @property
    def mark(self) -> dict[str, str]:
        """The variable by which its processes, and theirs, are known."""
        return {RUN: self.run}

    def processes(self) -> list[int]:
        """Those that run in its namespaces or carry its mark."""
        pids = {
            int(pid)
            for namespace in set(self.namespaces).intersection(namespaces())
            for pid in run("ip", "netns", "pids", namespace).split()
        }
        return sorted(pids | marked(f"{RUN}={self.run}"))

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
                raise ToolError(f"processes {pids} do not end")
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
    """Names of all network namespaces of the machine, also where ``ip`` is not to be found."""
    return [path.name for path in NAMESPACES.glob("*")]


def marked(variable: str) -> set[int]:
    """Processes that were started with ``NAME=value`` in their environment; of this user only."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended, or somebody else's
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
    return found


def read() -> tuple[list[Record], list[str]]:
    """Of all runs that have not been removed, and a sentence for each file that is no record."""
    found, problems = [], []
    for path in sorted(folder().glob("*.json")):
        try:
            text = path.read_text()
            if text:  # else it is just being written, or its run was killed in between
                found.append(Record(**json.loads(text)))
        except FileNotFoundError:
            pass  # just removed
        except (OSError, TypeError, ValueError) as error:
            problems.append(f"{path} is left alone, it is no record of this version: {error}")
    return found, problems


def clean(also_of_the_living: bool = False) -> tuple[list[Record], list[str]]:
    """Remove what runs left whose process is gone, or all of it.

    Returns:
        What was removed, and a sentence for each run or file that could not be.

    Raises:
        ToolError: the folder of the records belongs to somebody else.
    """
    removed = []
    with alone():
        for path in folder().glob("*.json"):
            if path.stat().st_size == 0:  # nobody is writing it now: killed, and nothing was made
                path.unlink()
        found, problems = read()
        for record in found:
            if record.owner_alive and not also_of_the_living:
                continue
            try:
                record._remove()
                removed.append(record)
            except (ToolError, OSError) as error:
                problems.append(f"run {record.run} is not removed: {error}")
    return removed, problems
