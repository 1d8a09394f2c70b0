"""A rank of a job that Bagua's own service tunes live, until it says that the tuning has ended.

    torchrun --nproc-per-node 2 benchmarks/jobs/bagua.py SPEC OUT

SPEC is that of tune.py with ``"service": "address:port"`` and, if workers are to report as those of
Bagua's release do, ``"report_every": 100``. OUT is that of tune.py without its log and its changes,
with ``samples``, the number of speeds that Bagua's optimiser was told, and ``reports``, all that
rank 0 reported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bagua_client import DistributedDataParallel
from benchmarks.bagua_0_9 import REPORT_EVERY
from benchmarks.bagua_0_9.environment import release_path
from benchmarks.bagua_0_9.worker import BaguaWorker, Report, load
from benchmarks.jobs.rank import TimedSteps, run, tuned
from benchmarks.recut import hooked
from benchmarks.workloads import training


def tune(spec: Mapping[str, Any], device: torch.device, bagua: SimpleNamespace) -> dict[str, Any]:
    """What OUT says. Steps before Bagua's worker begins are not counted as its tuning."""
    workload = training(spec, dist.get_rank(), device)
    wrapped = DistributedDataParallel(workload.model())
    steps = TimedSteps(workload.stepper(wrapped), device)
    tunable = hooked(wrapped)
    while not tunable.order_is_agreed:
        steps()
    before = len(steps)
    report_every = spec.get("report_every", REPORT_EVERY)
    worker = BaguaWorker(wrapped, spec["service"], bagua, steps.clock, report_every)
    while not worker.is_completed and len(steps) < spec["most_steps"]:
        steps()
        worker.after_backward()
    ended, tuning_steps = worker.is_completed, len(steps) - before
    for _ in range(max(1, spec["after_steps"])):
        steps()
    return {
        **tuned(wrapped, steps, ended, before, tuning_steps),
        "first_tuning_step": before,
        "samples": samples(worker.reports),
        "reports": [report.to_json() for report in worker.reports],
    }


def samples(reports: list[Report]) -> int:
    """Of the default, which is no power of two, the service tells its optimiser only the last
    report, when the warm-up has ended; of what it recommends, all."""
    tried = [report for report in reports if report.bucket_bytes != reports[0].bucket_bytes]
    return len(tried) + bool(tried)


def main() -> None:
    os.environ.pop("BAGUA_AUTOTUNE", None)  # else the client would tune, too
    bagua = load(release_path())
    run(__doc__, lambda spec, device: tune(spec, device, bagua))


if __name__ == "__main__":
    main()
