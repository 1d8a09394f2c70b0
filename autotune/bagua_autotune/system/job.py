"""One run of the user's job, which is ended with all processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from bagua_autotune.model.text import describe_seconds
from bagua_autotune.system.measures import OUTPUT_FILE, Measure, output_lines
from bagua_autotune.system.processes import adopting, ended_with_all_it_starts
from bagua_autotune.system.runs import Outcome

POLL_SECONDS = 0.05
# After a rank's error torchrun prints a screenful about it.
KEPT_LINES = 60


class Interrupted(Exception):
    """The user interrupted the search."""


class Job:
    """Runs the user's command; see ``search.Runner``.

    Args:
        command: with its arguments.
        measure: finds the speed.
        is_interrupted: asked all the time; once it is true, the run is ended with all processes.
    """

    def __init__(
        self, command: Sequence[str], measure: Measure, is_interrupted: Callable[[], bool]
    ) -> None:
        self._command = list(command)
        self._measure = measure
        self._is_interrupted = is_interrupted

    def __call__(self, environment: Mapping[str, str], timeout_seconds: float) -> Outcome:
        """Run it once.

        Raises:
            Interrupted: by ``is_interrupted``.
        """
        if self._is_interrupted():
            raise Interrupted
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="bagua-autotune-") as name:
            folder = Path(name)
            try:
                outcome = self._run(folder, environment, timeout_seconds)
            except OSError as error:
                return Outcome(failure=f"cannot be started: {error.strerror}: {error.filename}")
        return replace(outcome, seconds=time.monotonic() - began)

    def _run(self, folder: Path, environment: Mapping[str, str], timeout_seconds: float) -> Outcome:
        variables = {
            **os.environ,
            # Only the given variables may change anything; and output comes unbuffered.
            "BAGUA_AUTOTUNE": "0",
            "PYTHONUNBUFFERED": "1",
            **self._measure.environment(folder),
            **environment,
        }
        with adopting() as known, open(folder / OUTPUT_FILE, "wb") as output:
            process = subprocess.Popen(
                self._command,
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
                return replace(outcome, last_lines=tuple(lines[-KEPT_LINES:]))

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
            time.sleep(POLL_SECONDS)


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
