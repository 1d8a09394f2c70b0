"""One cell, from an empty network to its JSON file."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.support.cells.cell import (
    DEFAULT_COMPUTE_SECONDS,
    DEFAULT_GRADIENT_BYTES,
    TUNED,
    TUNED_ALLOWED,
    Cell,
    Effort,
    ours,
    sweep_arms,
)
from benchmarks.support.cells.jobs import CellError, Jobs
from benchmarks.support.cells.kept import conditions
from benchmarks.support.harness import write_json
from benchmarks.testbed import Network, Testbed

JOB_TIMEOUT_SECONDS = 1800.0
"""Of each job of a cell; several times what it takes in the default cells."""
SLOWEST_BITS_PER_SECOND = 3e8
"""The slowest network of the default cells."""
GPU_JOB_TIMEOUT_SECONDS = 300.0


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
        if testbed.fallback and not (loopback or cell.smoke):
            raise CellError(f"{testbed.fallback}; --loopback measures it all the same")
        result = _measured(cell, effort, unfinished, testbed)
    result["seconds"]["total"] = time.monotonic() - began
    write_json(unfinished / "cell.json", result)
    folder = output / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return (folder / "cell.json").replace(output / f"{cell.name}.json")


def _measured(cell: Cell, effort: Effort, folder: Path, testbed: Testbed) -> dict[str, Any]:
    """What the cell's JSON says."""
    jobs = Jobs(cell.name, cell.workload, folder, testbed, job_timeout_seconds(cell))
    found = conditions(testbed)
    limits = {"most_steps": effort.most_tuning_steps, "variables": effort.tuning_variables}
    tuning = jobs.tune(**limits)
    allowed = jobs.tune(allow=effort.allow, **limits) if effort.allow else None
    arms = [*sweep_arms(cell, effort), ours(TUNED, tuning["configuration"])]
    if allowed:
        arms.append(ours(TUNED_ALLOWED, allowed["configuration"]))
    again = {
        "rounds": effort.run_off_rounds,
        "steps": effort.run_off_steps,
        "cell": cell.to_json(),
        "effort": effort.to_json(),
    }
    # All arms in turns, then those that the results rest on, in one job.
    measured = jobs.measure(arms, effort.sweep_rounds, effort.sweep_steps, run_off=again)
    return {
        "cell": cell.to_json(),
        "effort": effort.to_json(),
        "conditions": {**found, "load_after": os.getloadavg()},
        "fallback": testbed.fallback,
        "arms": {arm["name"]: arm for arm in arms},
        "sweep": measured["sweep"],
        "run_off": measured["run_off"],
        "tuning": tuning,
        "allowed": allowed,
        "seconds": {**jobs.seconds, "sweep": measured["sweep"]["seconds"]},
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
