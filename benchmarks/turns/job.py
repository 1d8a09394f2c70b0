"""A training that makes its steps when it is told to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cells.stored import tail
from testbed import Testbed

GATE = Path(__file__).with_name("gate.py")
POLL_SECONDS = 0.02


class JobError(Exception):
    """A job that did not make its steps; the text says where its log is."""


class SteppedJob:
    """Starts at once, on all hosts, and waits after its first steps.

    Args:
        folder: for what it tells; made.
        script: a training script and its arguments.
        launcher: what stands before it on Python's command line.
        variables: environment of its ranks.
        first_steps: that it makes before it waits; a tuned one waits when its tuning has ended.
    """

    def __init__(
        self,
        testbed: Testbed,
        folder: Path,
        script: Sequence[str],
        launcher: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        first_steps: int = 3,
    ) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._log = folder / "log"
        self._ranks = testbed.nodes * testbed.ranks_per_node
        self._steps = first_steps
        self._allow()
        words = [*launcher, str(GATE), str(folder), *script]
        self._job = testbed.start(words, variables, self._log)

    def wait(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """What the ranks told when all of them waited.

        Raises:
            JobError: the job ended, or some rank did not come to wait.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            told = [self._told(rank) for rank in range(self._ranks)]
            if all(each and each["steps"] >= self._steps for each in told):
                self._steps = told[0]["steps"]
                return told
            if not self._job.is_running:
                raise JobError(f"the job has ended; {self._log} says:\n{tail(self._log)}")
            if time.monotonic() > deadline:
                raise JobError(f"did not wait after {timeout_seconds:g} s; see {self._log}")
            time.sleep(POLL_SECONDS)

    def make(self, steps: int, timeout_seconds: float) -> list[float]:
        """Seconds of each of so many further steps, on the slowest rank."""
        self._steps += steps
        self._allow()
        told = self.wait(timeout_seconds)
        return [max(ranks) for ranks in zip(*(each["seconds"] for each in told), strict=True)]

    def kill(self) -> None:
        self._job.kill()

    def _allow(self) -> None:
        new = self._folder / "allowed.new"
        new.write_text(str(self._steps))
        new.replace(self._folder / "allowed")

    def _told(self, rank: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self._folder / f"{rank}.json").read_text())
        except FileNotFoundError:
            return {}
        return found
