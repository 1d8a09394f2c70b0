"""A rank of a job that is tuned live, from its first step until the tuning ends.

    BAGUA_AUTOTUNE=1 torchrun --nproc-per-node 2 benchmarks/jobs/tune.py SPEC OUT

SPEC is a JSON file: a workload (see ``benchmarks/workloads``) and
``{"most_steps": 400, "after_steps": 10}``. Rank 0 writes OUT: the configuration that the job is
left at, what the tuning took, and the seconds of every step on the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bagua_client import DistributedDataParallel
from bagua_client.agent.clock import clock_for
from benchmarks.jobs.rank import process_group, slowest, write
from benchmarks.workloads import training
from benchmarks.workloads.training import gradient_sizes


class Lines(logging.Handler):
    """Keeps what the client says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def tune(spec: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What OUT says, but for the log.

    Raises:
        RuntimeError: the job is not tuned at all.
    """
    workload = training(spec, dist.get_rank(), device)
    wrapped = DistributedDataParallel(workload.model())
    if not wrapped.is_tuning:
        raise RuntimeError("the job is not tuned; set BAGUA_AUTOTUNE=1 and start several ranks")
    step = workload.stepper(wrapped)
    clock = clock_for(device)
    marks = [clock.mark()]
    # By the first step that ran under it.
    configurations = {0: wrapped.configuration}
    current = wrapped.configuration

    def run() -> None:
        nonlocal current
        step()
        if wrapped.configuration != current:
            current = configurations[len(marks) - 1] = wrapped.configuration
        marks.append(clock.mark())

    while wrapped.is_tuning and len(marks) <= spec["most_steps"]:
        run()
    ended, tuning_steps = not wrapped.is_tuning, len(marks) - 1
    # The configuration to keep comes into force in the step after.
    for _ in range(max(1, spec["after_steps"])):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    mine = [clock.seconds(*pair) for pair in pairwise(marks)]
    seconds = slowest(mine, device)
    sizes = gradient_sizes(wrapped)
    return {
        "configuration": wrapped.configuration.to_json(),
        "ended": ended,
        "steps": len(seconds),
        "tuning_steps": tuning_steps,
        "tuning_seconds": sum(seconds[:tuning_steps]),
        "first_tuning_step": next((step for step in configurations if step), None),
        "step_seconds": seconds,
        "configurations": [[step, used.to_json()] for step, used in configurations.items()],
        "gradient_bytes": sum(sizes),
        "tensors": len(sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    spec = json.loads(options.spec.read_text())
    heard = Lines()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("bagua_client").addHandler(heard)
    with process_group(spec.get("device", "cpu")) as device:
        result = tune(spec, device)
        if dist.get_rank() == 0:
            write(options.out, {**result, "log": heard.lines})


if __name__ == "__main__":
    main()
