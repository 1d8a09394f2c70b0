"""The jobs of one cell, all on its testbed."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.cells.cell import Arm
from benchmarks.support.cells.kept import tail, with_stored
from benchmarks.testbed import Testbed

JOBS = Path(__file__).resolve().parents[1] / "jobs"
OUT_OF_MEMORY = "OutOfMemoryError"
AFTER_STEPS = 10


class CellError(RuntimeError):
    """A cell that could not be measured; the text says what happened and where the log is."""


class Jobs:
    """See the module.

    Args:
        name: of the cell.
        workload: the part of a job's specification that all rank programs read.
        folder: for specifications, what jobs write, and logs.
        timeout_seconds: of each job.

    Attributes:
        seconds: what each job took, by its name.
    """

    def __init__(
        self,
        name: str,
        workload: Mapping[str, Any],
        folder: Path,
        testbed: Testbed,
        timeout_seconds: float,
    ) -> None:
        self._name, self._workload = name, workload
        self._folder, self._testbed = folder, testbed
        self._timeout_seconds = timeout_seconds
        self.seconds: dict[str, float] = {}
        if testbed.fallback:
            print(f"{name}: over loopback: {testbed.fallback}", flush=True)

    def served(self, folder: Path) -> dict[str, str]:
        """The variables by which a job finds a service of its own, whose database, a new one, is
        in ``folder``."""
        token, database = secrets.token_urlsafe(16), folder / "autotune.db"
        folder.mkdir(exist_ok=True)
        database.unlink(missing_ok=True)
        return {
            "BAGUA_AUTOTUNE_URL": self._testbed.serve(database, token, folder / "service.log"),
            "BAGUA_AUTOTUNE_TOKEN": token,
            "BAGUA_AUTOTUNE_JOB": self._name,
        }

    def tune(
        self, most_steps: int, allow: str = "", variables: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """A live tuning, by a service that knows of no other; with what that stored.

        Args:
            most_steps: one that has not ended by then is cut off.
            allow: what may be tried though it changes the numbers.
            variables: further ones of the job.
        """
        folder = self._folder / "allowed" if allow else self._folder
        told = {
            **self.served(folder),
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_ALLOW": allow,
            **(variables or {}),
        }
        limits = {"most_steps": most_steps, "after_steps": AFTER_STEPS, "tells_loss": bool(allow)}
        tuning = self.run("tune", "tune allowed" if allow else "tune", limits, told)
        return with_stored(tuning, folder / "autotune.db", self._name, folder)

    def measure(self, arms: Sequence[Arm], rounds: int, steps: int, **more: Any) -> dict[str, Any]:
        """Those arms in turns: ``rounds`` blocks of each; see jobs/measure.py."""
        specification = {"arms": arms, "rounds": rounds, "steps": steps, "warmup_steps": 1, **more}
        return self.run("measure", "sweep and run-off", specification)

    def run(
        self,
        program: str,
        name: str,
        specification: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        """One torchrun job over all hosts, and what its rank 0 wrote.

        Raises:
            CellError: it failed, or took longer.
        """
        began = time.monotonic()
        reads, writes, log = (
            self._folder / f"{name.replace(' ', '-')}{end}"
            for end in (".spec.json", ".json", ".log")
        )
        writes.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        reads.write_text(json.dumps({**self._workload, **specification}, indent=2))
        script = [str(JOBS / f"{program}.py"), str(reads), str(writes)]
        job = self._testbed.start(script, variables, log)
        try:
            code = job.wait(timeout_seconds or self._timeout_seconds)
        except TimeoutError as error:
            raise CellError(f"{program}.py: {error}; {log} ends:\n{tail(log)}") from None
        self.seconds[name] = time.monotonic() - began
        if code or not writes.exists():
            if log.exists() and OUT_OF_MEMORY in log.read_text(errors="replace"):
                print(f"{self._name}: {name} ran out of memory", file=sys.stderr, flush=True)
            raise CellError(f"{program}.py ended with exit code {code}; {log} ends:\n{tail(log)}")
        print(f"{self._name}: {name}, {self.seconds[name]:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(writes.read_text())
        return found
