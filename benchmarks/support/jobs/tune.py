"""A rank of a job that is tuned live, from its first step until the tuning ends.

    BAGUA_AUTOTUNE=1 torchrun --nproc-per-node 2 benchmarks/support/jobs/tune.py SPEC OUT

SPEC is a JSON file: a workload (see ``benchmarks/support/workloads``) and
``{"most_steps": 400, "after_steps": 10}``, and ``"tells_loss": true`` if the job is to say that its
loss stays as it is. Rank 0 writes OUT: the configuration that the job is left at, what the tuning
took, and the seconds of every step on the slowest rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bagua_client import DistributedDataParallel, tune
from benchmarks.support.jobs.rank import TimedSteps, gradients, peak_bytes, run
from benchmarks.support.workloads import training
from tests.client.listening import logged


def tuned(spec: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What OUT says, but for the log.

    Raises:
        RuntimeError: the job is not tuned at all.
    """
    workload = training(spec, dist.get_rank(), device)
    model = workload.model()
    wrapped: Any = tune(model) if spec.get("sharding") else DistributedDataParallel(model)
    steps = TimedSteps(workload.stepper(wrapped), device)
    if spec.get("sharding"):  # The tuning of a sharded model begins with its first step.
        steps()
    if not wrapped.is_tuning:
        raise RuntimeError("the job is not tuned; set BAGUA_AUTOTUNE=1 and start several ranks")
    current = wrapped.configuration
    # By the first step that ran under it.
    configurations = {0: current}

    def step() -> None:
        nonlocal current
        steps()
        if spec.get("tells_loss"):  # One that stays as it is: what is asked here is the speed.
            wrapped.report_loss(1.0)
        # Agreed on at the end of a step, in force from the next one on.
        if wrapped.configuration != current:
            current = configurations[len(steps)] = wrapped.configuration

    while wrapped.is_tuning and len(steps) < spec["most_steps"]:
        step()
    ended, tuning_steps = not wrapped.is_tuning, len(steps)
    # The configuration to keep comes into force in the step after.
    for _ in range(max(1, spec["after_steps"])):
        step()
    seconds = steps.seconds()
    return {
        "configuration": wrapped.configuration.to_json(),
        "ended": ended,
        "steps": len(seconds),
        "tuning_steps": tuning_steps,
        "tuning_seconds": sum(seconds[:tuning_steps]),
        "step_seconds": seconds,
        "peak_bytes": peak_bytes(device),
        **gradients(wrapped),
        "first_tuning_step": next((step for step in configurations if step), None),
        "configurations": [[step, used.to_json()] for step, used in configurations.items()],
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with logged() as lines:
        run(__doc__, lambda spec, device: {**tuned(spec, device), "log": lines})


if __name__ == "__main__":
    main()
