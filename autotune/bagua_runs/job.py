"""One run of the user's job, which is ended with all processes that it started."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from bagua_autotune.model.text import describe_seconds
from bagua_runs.outcomes import OUTPUT_FILE, Measure, Outcome, output_lines
from bagua_runs.places import EnvironmentVariable, FileKey, Place, Start

# Whether a run ended because there was no memory left, as far as that can be told.

# Behind the error of one rank torchrun and the other ranks may print a lot.
LAST_LINES = 300
MOST_CHARACTERS = 160

# Of torchrun's ranks.
_PREFIX = re.compile(r"^\[[^\]]*rank ?\d+\]: ?", re.IGNORECASE)
# torch on a GPU; CUDA by itself, and NCCL; torch on a CPU; Python; C++; the system.
_SAID = re.compile(
    r"OutOfMemoryError:|CUDA out of memory|(?:CUDA|Cuda) (?:error|failure).*out of memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|^\S*MemoryError\b"
    r"|std::bad_alloc|Cannot allocate memory"
)
# Of the run itself, and what torchrun says of a rank.
_KILLED = re.compile(r"exitcode *: *-9\b|Signal 9 \(SIGKILL\)|exit code:? -9\b")
SIGKILL_CODES = (-9, 128 + 9)


def kills_of_the_system() -> int:
    """How many processes this machine's kernel has killed for lack of memory so far; 0 if it does
    not say that (Linux: ``oom_kill`` in /proc/vmstat)."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def lack_of_memory(lines: Sequence[str], exit_code: int | None, kills: int) -> str:
    """Return how a failed run said that it had no memory left; empty: it did not.

    Args:
        lines: of its output.
        exit_code: of the run, below 0 for a signal; None: it was still running.
        kills: how many processes the kernel has killed for lack of memory since it began.
    """
    last = [_PREFIX.sub("", line.strip()) for line in lines[-LAST_LINES:]]
    said = [line for line in last if _SAID.search(line)]
    if said:
        return said[-1][:MOST_CHARACTERS]
    is_killed = exit_code in SIGKILL_CODES or any(map(_KILLED.search, last))
    return "killed by the kernel for lack of memory" if kills > 0 and is_killed else ""


POLL_SECONDS = 0.05
# After a rank's error torchrun prints a screenful about it.
KEPT_LINES = 60
# In the folder of a run: changed copies of the user's files.
FILES = "files"


class Interrupted(Exception):
    """The user interrupted the search."""


class Job:
    """Runs the user's command; see ``search.Runner``.

    Args:
        command: with its arguments.
        measure: finds the speed.
        is_interrupted: asked all the time; once it is true, the run is ended with all processes.
        beat: called all the time while a run goes on.
        places: by the name of a setting: where its value goes. A name that is not here is that of
            an environment variable.
    """

    def __init__(
        self,
        command: Sequence[str],
        measure: Measure,
        is_interrupted: Callable[[], bool],
        places: Mapping[str, Place] | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._command = tuple(command)
        self._measure = measure
        self._is_interrupted = is_interrupted
        self._places = places or {}
        self._beat = beat

    def start(self, changes: Mapping[str, str], folder: Path | None) -> Start:
        """How it is started with other values of some settings.

        Args:
            changes: the values, by the names of the settings.
            folder: changed files are written here; None: values in files are left out.
        """
        start = Start(self._command)
        for name, text in changes.items():
            place = self._places.get(name, EnvironmentVariable(name))
            if folder is not None:
                start = place.put(start, text, folder)
            elif not isinstance(place, FileKey):
                start = place.put(start, text, Path())
        return start

    def __call__(self, changes: Mapping[str, str], timeout_seconds: float) -> Outcome:
        """Run it once, with other values of some settings.

        Raises:
            Interrupted: by ``is_interrupted``.
        """
        if self._is_interrupted():
            raise Interrupted
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="bagua-autotune-") as name:
            folder = Path(name)
            try:
                outcome = self._run(folder, changes, timeout_seconds)
            except OSError as error:
                return Outcome(failure=f"cannot be started: {error.strerror}: {error.filename}")
        return replace(outcome, seconds=time.monotonic() - began)

    def _run(self, folder: Path, changes: Mapping[str, str], timeout_seconds: float) -> Outcome:
        files = folder / FILES
        files.mkdir()
        start = self.start(changes, files)
        variables = {
            **os.environ,
            # Only the given settings may change anything; and output comes unbuffered.
            "BAGUA_AUTOTUNE": "0",
            "PYTHONUNBUFFERED": "1",
            **self._measure.environment(folder),
            **start.environment,
        }
        kills = kills_of_the_system()
        with adopting() as known, open(folder / OUTPUT_FILE, "wb") as output:
            process = subprocess.Popen(
                start.command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with ended_with_all_it_starts(process, known):
                outcome = self._wait(process, folder, timeout_seconds)
                # Before it is ended: its messages about that are of no interest.
                lines = [line for line in output_lines(folder) if line.strip()]
                kills = kills_of_the_system() - kills
                return _with_output(outcome, lines, kills)

    def _wait(
        self, process: subprocess.Popen[bytes], folder: Path, timeout_seconds: float
    ) -> Outcome:
        began = time.monotonic()
        while True:
            # Before reading the result: what was complete when it ended is complete now.
            code = process.poll()
            outcome = self._measure.result(folder, is_over=code == 0)
            if outcome is not None:
                return outcome
            if code is not None:
                how = f"exit code {code}" if code > 0 else f"signal {-code}"
                # As a shell has it for a signal.
                exit_code = code if code > 0 else 128 - code
                return Outcome(failure=f"ended with {how}", exit_code=exit_code)
            if time.monotonic() - began > timeout_seconds:
                return Outcome(failure=f"gave no result within {describe_seconds(timeout_seconds)}")
            if self._is_interrupted():
                raise Interrupted
            self._beat()
            time.sleep(POLL_SECONDS)


def _with_output(outcome: Outcome, lines: Sequence[str], kills: int) -> Outcome:
    """An outcome with what the output says of it; ``kills``: see ``lack_of_memory``."""
    outcome = replace(outcome, last_lines=tuple(lines[-KEPT_LINES:]))
    said = lack_of_memory(lines, outcome.exit_code, kills) if outcome.failure else ""
    if said:
        return replace(outcome, failure=f"ran out of memory: {said}", is_out_of_memory=True)
    return outcome


@contextmanager
def stopping() -> Iterator[list[int]]:
    """The signals that asked us to stop: noted, so that what is under way can be ended whole."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The end of all processes that a command has started.
#
# torchrun starts its ranks in sessions of their own, so a signal to a process group does not reach
# them, and they outlive a torchrun that was killed. So the process tree is read from /proc, and we
# adopt processes that lose their parent (Linux: PR_SET_CHILD_SUBREAPER), so that they stay in it.

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
GRACE_SECONDS = 5.0
KILLED_SECONDS = 10.0
ENDING_POLL_SECONDS = 0.02


@contextmanager
def ended_with_all_it_starts(process: subprocess.Popen[bytes], known: set[int]) -> Iterator[None]:
    """When the block ends, end ``process`` and all that it has started.

    Args:
        known: our other children.
    """
    try:
        yield
    finally:
        _end(process, known)


@contextmanager
def adopting() -> Iterator[set[int]]:
    """Adopt processes that lose their parent inside the block; gives our earlier children."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield set(_children().get(os.getpid(), []))
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _end(process: subprocess.Popen[bytes], known: set[int]) -> None:
    """End the processes: ask them first, and kill them after a while."""
    asked: set[int] = set()
    began = time.monotonic()
    while True:
        process.poll()
        left = _started(known)
        _reap(left - {process.pid})
        waited = time.monotonic() - began
        if not left or waited > GRACE_SECONDS + KILLED_SECONDS:
            return
        is_last = waited > GRACE_SECONDS
        for pid in left if is_last else left - asked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if is_last else signal.SIGTERM)
        asked |= left
        time.sleep(ENDING_POLL_SECONDS)


def _started(known: set[int]) -> set[int]:
    """All our descendants except ``known`` and theirs."""
    children = _children()
    found: set[int] = set()
    upcoming = [pid for pid in children.get(os.getpid(), []) if pid not in known]
    while upcoming:
        pid = upcoming.pop()
        if pid not in found:
            found.add(pid)
            upcoming += children.get(pid, [])
    return found


def _reap(pids: set[int]) -> None:
    """Reap those of our children that have ended."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _children() -> dict[int, list[int]]:
    """The children of every visible process of this machine."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            # The name before, in parentheses, may hold anything.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            found.setdefault(int(fields[1]), []).append(int(folder.name))
    return found
