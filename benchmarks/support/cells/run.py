"""One cell, from an empty network to its JSON file."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.cells.cell import (
    DEFAULT_COMPUTE_SECONDS,
    DEFAULT_GRADIENT_BYTES,
    TUNED,
    TUNED_ALLOWED,
    Arm,
    Cell,
    Effort,
    ours,
    sweep_arms,
)
from benchmarks.support.cells.kept import conditions, tail, with_stored
from benchmarks.support.harness import write_json
from benchmarks.testbed import Network, Testbed

JOBS = Path(__file__).resolve().parents[1] / "jobs"
JOB_TIMEOUT_SECONDS = 1800.0
"""Of each job of a cell; several times what it takes in the default cells."""
SLOWEST_BITS_PER_SECOND = 3e8
"""The slowest network of the default cells."""
GPU_JOB_TIMEOUT_SECONDS = 300.0
AFTER_STEPS = 10


class CellError(Exception):
    """A cell that could not be measured; the text says what happened and where the log is."""


def run_cell(cell: Cell, effort: Effort, output: Path, loopback: bool = False) -> Path:
    """Tune, sweep, run off; return the cell's JSON file, written when all is measured.

    What an earlier run of the cell left is replaced then, and not before.

    Args:
        loopback: where hosts cannot be made, run over loopback.

    Raises:
        CellError: a part of it failed. What it left is in the folder ``output/NAME.unfinished``.
    """
    began = time.monotonic()
    unfinished = output.resolve() / f"{cell.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    network = Network.parse(cell.network)
    size = (cell.nodes, cell.ranks_per_node)
    with Testbed(network, *size, gpus=cell.device == "cuda") as testbed:
        if testbed.fallback:
            if not (loopback or cell.smoke):
                raise CellError(f"{testbed.fallback}; --loopback measures it all the same")
            print(f"{cell.name}: loopback instead of {network}: {testbed.fallback}", flush=True)
        result = _measured(cell, effort, unfinished, testbed)
    result["seconds"]["total"] = time.monotonic() - began
    write_json(unfinished / "cell.json", result)
    folder = output / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return (folder / "cell.json").replace(output / f"{cell.name}.json")


def _measured(cell: Cell, effort: Effort, folder: Path, testbed: Testbed) -> dict[str, Any]:
    """What the cell's JSON says."""
    seconds: dict[str, float] = {}
    parts = Parts(cell, effort, folder, testbed, seconds)
    found = conditions(testbed)
    tuning = parts.tune()
    allowed = parts.tune(effort.allow) if effort.allow else None
    arms = [*sweep_arms(cell, effort), ours(TUNED, tuning["configuration"])]
    if allowed:
        arms.append(ours(TUNED_ALLOWED, allowed["configuration"]))
    sweep, run_off = parts.sweep_and_run_off(arms)
    return {
        "cell": cell.to_json(),
        "effort": effort.to_json(),
        "conditions": {**found, "load_after": os.getloadavg()},
        "fallback": testbed.fallback,
        "arms": {arm["name"]: arm for arm in arms},
        "sweep": sweep,
        "run_off": run_off,
        "tuning": tuning,
        "allowed": allowed,
        "seconds": seconds,
    }


def job_timeout_seconds(cell: Cell) -> float:
    """Longer for a cell whose steps take longer than those of the default cells may; short where
    time is dear."""
    if cell.device == "cuda":
        return GPU_JOB_TIMEOUT_SECONDS
    rate = Network.parse(cell.network).rate_bits_per_second or SLOWEST_BITS_PER_SECOND
    communicating = cell.gradient_bytes / DEFAULT_GRADIENT_BYTES * SLOWEST_BITS_PER_SECOND / rate
    computing = cell.compute_seconds / DEFAULT_COMPUTE_SECONDS
    return JOB_TIMEOUT_SECONDS * max(1.0, communicating, computing)


class Parts:
    """The jobs of one cell, all on its testbed."""

    def __init__(
        self,
        cell: Cell,
        effort: Effort,
        folder: Path,
        testbed: Testbed,
        seconds: dict[str, float],
    ) -> None:
        self._cell = cell
        self._effort = effort
        self._folder = folder
        self._testbed = testbed
        self._seconds = seconds

    def tune(self, allow: str = "") -> dict[str, Any]:
        """A live tuning, by a service on the testbed that knows of no other; with what it stored.

        Args:
            allow: what may be tried though it changes the numbers.
        """
        token = secrets.token_urlsafe(16)
        folder = self._folder / "allowed" if allow else self._folder
        folder.mkdir(exist_ok=True)
        database = folder / "autotune.db"
        url = self._testbed.serve(database, token, log=folder / "service.log")
        variables = {
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_URL": url,
            "BAGUA_AUTOTUNE_TOKEN": token,
            "BAGUA_AUTOTUNE_JOB": self._cell.name,
            "BAGUA_AUTOTUNE_ALLOW": allow,
            **self._effort.tuning_variables,
        }
        limits = {
            "most_steps": self._effort.most_tuning_steps,
            "after_steps": AFTER_STEPS,
            "tells_loss": bool(allow),
        }
        name = "tune allowed" if allow else "tune"
        tuning = self._run("tune", name, limits, variables)
        return with_stored(tuning, database, self._cell.name, folder)

    def sweep_and_run_off(self, arms: Sequence[Arm]) -> tuple[dict[str, Any], dict[str, Any]]:
        """All arms in turns, then those that the results rest on, in one job."""
        effort = self._effort
        again = {
            "rounds": effort.run_off_rounds,
            "steps": effort.run_off_steps,
            "cell": self._cell.to_json(),
            "effort": effort.to_json(),
        }
        found = self.measure(
            "sweep and run-off", arms, effort.sweep_rounds, effort.sweep_steps, run_off=again
        )
        self._seconds["sweep"] = found["sweep"]["seconds"]
        return found["sweep"], found["run_off"]

    def measure(
        self,
        name: str,
        arms: Sequence[Arm],
        rounds: int,
        steps: int,
        variables: Mapping[str, str] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Those arms in turns: ``rounds`` blocks of each; see jobs/measure.py."""
        specification = {"arms": arms, "rounds": rounds, "steps": steps, "warmup_steps": 1, **more}
        return self._run("measure", name, specification, variables)

    def _run(
        self,
        program: str,
        name: str,
        specification: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """One torchrun job over all hosts, and what its rank 0 wrote."""
        began = time.monotonic()
        reads, writes, log = (
            self._folder / f"{name.replace(' ', '-')}{end}"
            for end in (".spec.json", ".json", ".log")
        )
        reads.write_text(json.dumps({**self._cell.workload, **specification}, indent=2))
        script = [str(JOBS / f"{program}.py"), str(reads), str(writes)]
        job = self._testbed.start(script, variables, log=log)
        try:
            code = job.wait(job_timeout_seconds(self._cell))
        except TimeoutError as error:
            raise CellError(f"{program}.py: {error}; {log} ends:\n{tail(log)}") from None
        self._seconds[name] = time.monotonic() - began
        if code or not writes.exists():
            raise CellError(f"{program}.py ended with exit code {code}; {log} ends:\n{tail(log)}")
        print(f"{self._cell.name}: {name} {self._seconds[name]:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(writes.read_text())
        return found
