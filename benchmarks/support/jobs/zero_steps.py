"""A rank of a job that trains an engine of DeepSpeed and is to be ended by who started it.

    torchrun --nproc-per-node 2 benchmarks/support/jobs/zero_steps.py SPEC CONFIG

SPEC is a JSON file: a workload (see ``benchmarks/support/workloads``) and ``{"steps": 100}``, after
which it ends by itself. CONFIG is DeepSpeed's file. Nothing is written: who started it times the
optimizer's steps, as ``bagua-autotune system`` does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.support.jobs.rank import process_group
from benchmarks.support.workloads import training


def main() -> None:
    spec, config = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    with process_group(spec["device"]) as device:
        workload = training({**spec, "deepspeed": config}, dist.get_rank(), device)
        step = workload.stepper(workload.model())
        for _ in range(spec["steps"]):
            step()


if __name__ == "__main__":
    main()
