"""A rank of a job that Bagua's own service tunes live, until it says that the tuning has ended.

    torchrun --nproc-per-node 2 benchmarks/jobs/bagua.py SPEC OUT

SPEC is that of tune.py with ``"service": "address:port"`` and, if Bagua's workers are not to
report every 10 steps but as their release does, ``"report_every": 100``. OUT is that of tune.py
without its log, with ``samples``, the number of speeds that Bagua's optimiser was told, and
``reports``, all that rank 0 reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bagua_client import DistributedDataParallel
from bagua_client.agent.clock import clock_for
from bagua_client.reducer.ready_order import RECORDED_STEPS
from benchmarks.bagua_0_9.environment import release_path
from benchmarks.bagua_0_9.worker import BaguaWorker, Report, load
from benchmarks.jobs.rank import process_group, slowest, write
from benchmarks.workloads import training
from benchmarks.workloads.training import gradient_sizes

REPORT_EVERY = 10


def tune(spec: Mapping[str, Any], device: torch.device, bagua: SimpleNamespace) -> dict[str, Any]:
    """What OUT says. Steps before Bagua's worker begins are not counted as its tuning."""
    workload = training(spec, dist.get_rank(), device)
    wrapped = DistributedDataParallel(workload.model())
    step = workload.stepper(wrapped)
    clock = clock_for(device)
    marks = [clock.mark()]

    def run() -> None:
        step()
        marks.append(clock.mark())

    for _ in range(RECORDED_STEPS):
        run()
    worker = BaguaWorker(
        wrapped, spec["service"], bagua, clock, spec.get("report_every", REPORT_EVERY)
    )
    while not worker.is_completed and len(marks) <= spec["most_steps"]:
        run()
        worker.after_backward()
    ended, tuning_steps = worker.is_completed, len(marks) - 1 - RECORDED_STEPS
    for _ in range(max(1, spec["after_steps"])):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = slowest([clock.seconds(*pair) for pair in pairwise(marks)], device)
    sizes = gradient_sizes(wrapped)
    return {
        "configuration": wrapped.configuration.to_json(),
        "ended": ended,
        "steps": len(seconds),
        "tuning_steps": tuning_steps,
        "tuning_seconds": sum(seconds[RECORDED_STEPS:][:tuning_steps]),
        "first_tuning_step": RECORDED_STEPS,
        "step_seconds": seconds,
        "gradient_bytes": sum(sizes),
        "tensors": len(sizes),
        "samples": samples(worker.reports),
        "reports": [report.to_json() for report in worker.reports],
    }


def samples(reports: list[Report]) -> int:
    """Of the default, which is no power of two, the service tells its optimiser only the last
    report, when the warm-up has ended; of what it recommends, all."""
    tried = [report for report in reports if report.bucket_bytes != reports[0].bucket_bytes]
    return len(tried) + bool(tried)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    spec = json.loads(options.spec.read_text())
    os.environ.pop("BAGUA_AUTOTUNE", None)  # else the client would tune, too
    bagua = load(release_path())
    with process_group(spec.get("device", "cpu")) as device:
        result = tune(spec, device, bagua)
        if dist.get_rank() == 0:
            write(options.out, result)


if __name__ == "__main__":
    main()
