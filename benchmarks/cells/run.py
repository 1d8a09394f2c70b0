"""One cell, from an empty network to its JSON file."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bagua_0_9.service import bagua_service
from harness import write_json
from testbed import Network, Testbed

from .arms import BAGUA_TUNED, TUNED, Arm, Effort, is_swept, ours, run_off_arms, sweep_arms
from .cell import Cell
from .stored import export_job, tail

JOBS = Path(__file__).resolve().parents[1] / "jobs"
JOB_TIMEOUT_SECONDS = 1800.0
AFTER_STEPS = 10
MOST_BAGUA_STEPS = 1500
"""Its 60 samples, 10 steps each, and its warm-up take about half of them."""


class CellError(Exception):
    """A cell that could not be measured; the text says what happened and where the log is."""


def run_cell(cell: Cell, effort: Effort, output: Path) -> Path:
    """Tune, sweep, run off; return the cell's JSON file, written when all is measured.

    Raises:
        CellError: a part of it failed. What it left is in the folder ``output/NAME``.
    """
    began = time.monotonic()
    folder = output.resolve() / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    seconds: dict[str, float] = {}
    network = Network.parse(cell.network)
    with Testbed(network, nodes=cell.nodes, ranks_per_node=cell.ranks_per_node) as testbed:
        if testbed.fallback:
            print(f"{cell.name}: loopback instead of {network}: {testbed.fallback}", flush=True)
        parts = Parts(cell, effort, folder, testbed, seconds)
        tuning = parts.tune()
        bagua = parts.tune_by_bagua() if cell.bagua else None
        arms = [*sweep_arms(cell, effort), ours(TUNED, tuning["configuration"])]
        if bagua:
            arms.append(ours(BAGUA_TUNED, bagua["configuration"]))
        sweep = parts.measure("sweep", arms, effort.sweep_rounds, effort.sweep_steps)
        finalists = run_off_arms(arms, best_of(sweep, arms, effort.finalists))
        run_off = parts.measure("run_off", finalists, effort.run_off_rounds, effort.run_off_steps)
        fallback = testbed.fallback
    seconds["total"] = time.monotonic() - began
    result = {
        "cell": cell.to_json(),
        "fallback": fallback,
        "arms": {arm["name"]: arm for arm in arms},
        "sweep": sweep,
        "run_off": run_off,
        "tuning": tuning,
        "bagua": bagua,
        "seconds": seconds,
    }
    path = output / f"{cell.name}.json"
    unfinished = path.with_suffix(".unfinished")
    write_json(unfinished, result)
    return unfinished.replace(path)


def best_of(measured: Mapping[str, Any], arms: Sequence[Arm], count: int) -> list[str]:
    """The names of the fastest of the sweep."""
    times = {
        arm["name"]: median([s for block in measured["arms"][arm["name"]] for s in block])
        for arm in arms
        if is_swept(arm)
    }
    return sorted(times, key=times.__getitem__)[:count]


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

    def tune(self) -> dict[str, Any]:
        """The live tuning, by the service on the testbed; with what the service stored of it."""
        token = secrets.token_urlsafe(16)
        database = self._folder / "autotune.db"
        url = self._testbed.serve(database, token, log=self._folder / "service.log")
        variables = {
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_URL": url,
            "BAGUA_AUTOTUNE_TOKEN": token,
            "BAGUA_AUTOTUNE_JOB": self._cell.name,
            **self._effort.tuning_variables,
        }
        limits = {"most_steps": self._effort.most_tuning_steps, "after_steps": AFTER_STEPS}
        tuning = self._run("tune", limits, variables)
        stored = export_job(database, self._cell.name, self._folder)
        return {**tuning, "stored": stored}

    def tune_by_bagua(self) -> dict[str, Any]:
        """A live tuning by Bagua's own service, on the same host as ours, with its defaults."""
        world_size = self._cell.nodes * self._cell.ranks_per_node
        host, limits = self._testbed.service_host, self._effort.bagua_limits
        with bagua_service(host, world_size, self._folder, **limits) as address:
            steps = {"most_steps": MOST_BAGUA_STEPS, "after_steps": AFTER_STEPS}
            return self._run("bagua", {"service": address, "report_every": 10, **steps})

    def measure(self, name: str, arms: Sequence[Arm], rounds: int, steps: int) -> dict[str, Any]:
        """All arms in turns: ``rounds`` blocks of each."""
        specification = {"arms": arms, "rounds": rounds, "steps": steps, "warmup_steps": 1}
        return self._run("measure", specification, name=name)

    def _run(
        self,
        program: str,
        specification: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """One torchrun job over all hosts, and what its rank 0 wrote."""
        name = name or program
        began = time.monotonic()
        reads, writes, log = (
            self._folder / f"{name}{end}" for end in (".spec.json", ".json", ".log")
        )
        reads.write_text(json.dumps({**self._cell.workload, **specification}, indent=2))
        script = [str(JOBS / f"{program}.py"), str(reads), str(writes)]
        # The jobs are not tuned unless they are told to be, whatever this process was told.
        inherited = {key: "" for key in os.environ if key.startswith("BAGUA_")}
        job = self._testbed.start(script, {**inherited, **(variables or {})}, log=log)
        code = job.wait(JOB_TIMEOUT_SECONDS)
        self._seconds[name] = time.monotonic() - began
        if code or not writes.exists():
            raise CellError(f"{program}.py ended with exit code {code}; {log} ends:\n{tail(log)}")
        print(f"{self._cell.name}: {name} {self._seconds[name]:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(writes.read_text())
        return found
