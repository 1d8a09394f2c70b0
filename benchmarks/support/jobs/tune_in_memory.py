"""A rank of a job that is tuned again and again, each time with another limit of its memory.

    torchrun --nproc-per-node 2 benchmarks/support/jobs/tune_in_memory.py SPEC OUT

SPEC is a JSON file: a sharded workload (see ``benchmarks/support/workloads``) and
``{"tunings": 20, "seed": 0, "most_steps": 300}``. First each setting is measured by hand: what a
step takes, and the memory. Then the model is tuned that often; the limit lies at random between a
little more than the default takes and what keeping everything takes. Rank 0 writes OUT after each
tuning. On the CPU the memory is on paper (see ``scripted_memory``).
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bagua_client import tune
from bagua_client.configuration import Configuration
from bagua_client.integrations.sharded_model import tunable_of
from benchmarks.support.jobs.rank import TimedSteps, run, slowest, write
from benchmarks.support.workloads import training
from tests.client.scripted_memory import ScriptedMemory

SHARE = 0.9
ROOM = 1.05
"""The least limit, in peaks of the default."""
WARMUP_STEPS, MEASURED_STEPS = 2, 6
REST_BYTES = 2**26
CHANNELS = (1, 4)
KNOBS = "-bucket_bytes,-prefetch,-scatter_group,-scatter_buffers,channels=1/4"
"""What is left is what is swept by hand: kept units, and these channels."""
Setting = dict[str, Any]


class Limit:
    """The memory that the rank has.

    Attributes:
        scripted: the memory on paper; None: that of a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.scripted: ScriptedMemory | None = None
        self._allowed_bytes = 2**60

    def set(self, allowed_bytes: int | None) -> None:
        """Allow so much from now on; None: all that there is."""
        self._allowed_bytes = 2**60 if allowed_bytes is None else allowed_bytes
        if self._device.type == "cuda":
            total_bytes = torch.cuda.get_device_properties(self._device).total_memory
            share = 1.0 if allowed_bytes is None else min(allowed_bytes / total_bytes, 1.0)
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(share, self._device)

    def begin(self, model: Any) -> None:
        """The model has made its first step."""
        if self._device.type != "cuda":
            self.scripted = ScriptedMemory(tunable_of(model), REST_BYTES, self._allowed_bytes)

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self, model: Any) -> int:
        """Since the reset, on the fullest rank. All ranks call it together."""
        if self.scripted is not None:
            own = self.scripted.peak_of(tunable_of(model).layout)
        else:
            own = torch.cuda.max_memory_allocated(self._device)
        return int(slowest([float(own)], self._device)[0])

    def overflows(self) -> bool:
        """Whether a GPU of this size would have ended the training; a real one does."""
        return self.scripted is not None and self.scripted.most_bytes > self._allowed_bytes


def sweep(spec: Mapping[str, Any], device: torch.device, limit: Limit) -> list[Setting]:
    """Each setting by hand, the default first: seconds of a step, and the peak."""
    workload = training(spec, dist.get_rank(), device)
    model: Any = tune(workload.model())
    steps = TimedSteps(workload.stepper(model), device)
    steps()
    limit.set(None)
    limit.begin(model)
    for _ in range(3):
        steps()
    tunable = tunable_of(model)
    kept = tunable.offer.values()["kept_units"]
    found = []
    for count, keep in itertools.product(CHANNELS, sorted(map(int, kept))):
        configuration = replace(tunable.default, channels=count, kept_units=keep)
        if not model.reconfigure(configuration):
            raise RuntimeError(f"{configuration} cannot be set by hand")
        for _ in range(WARMUP_STEPS):
            steps()
        limit.reset()
        before = len(steps)
        for _ in range(MEASURED_STEPS):
            steps()
        seconds = median(steps.seconds()[before:])
        peak_bytes = limit.peak_bytes(model)
        found.append({"configuration": _named(configuration), "seconds": seconds})
        found[-1]["peak_bytes"] = peak_bytes
    return found


def tuned(
    spec: Mapping[str, Any], device: torch.device, limit: Limit, allowed_bytes: int
) -> dict[str, Any]:
    """One tuning, with so much memory."""
    workload = training(spec, dist.get_rank(), device)
    limit.set(allowed_bytes)
    model: Any = tune(workload.model())
    os.environ["BAGUA_AUTOTUNE"] = "1"
    steps = TimedSteps(workload.stepper(model), device)
    steps()
    del os.environ["BAGUA_AUTOTUNE"]
    limit.begin(model)
    if not model.is_tuning:
        raise RuntimeError("the job is not tuned")
    while model.is_tuning and len(steps) < spec["most_steps"]:
        steps()
    tuning = model.tuning
    for _ in range(WARMUP_STEPS):
        steps()
    return {
        "job": tuning.job,
        "allowed_bytes": allowed_bytes,
        "steps": len(steps),
        "seconds": sum(steps.seconds()),
        "state": tuning.state,
        "summary": tuning.summary,
        "configuration": _named(model.configuration),
        "peak_bytes": tuning.peak_bytes,
        "overflows": bool(slowest([float(limit.overflows())], device)[0]),
    }


def _named(configuration: Configuration) -> Setting:
    said = configuration.to_json()
    return {"kept_units": said.get("kept_units", 0), "channels": said.get("channels", 1)}


def work(spec: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """See the module."""
    limit, out = Limit(device), Path(sys.argv[2])
    os.environ.pop("BAGUA_AUTOTUNE", None)  # Not while it is swept by hand.
    os.environ["BAGUA_AUTOTUNE_KNOBS"] = KNOBS
    os.environ["BAGUA_AUTOTUNE_FRESH"] = "1"
    swept = sweep(spec, device, limit)
    low, high = ROOM * swept[0]["peak_bytes"], max(each["peak_bytes"] for each in swept)
    choose = random.Random(spec["seed"])
    found: list[dict[str, Any]] = []
    for number in range(spec["tunings"]):
        gc.collect()
        limit_bytes = choose.uniform(min(low, high), high)
        job = f"{spec['workload']}-{number}"
        os.environ["BAGUA_AUTOTUNE_JOB"] = job
        found.append(tuned(spec, device, limit, int(limit_bytes / SHARE)))
        if dist.get_rank() == 0:
            write(out, {"swept": swept, "tunings": found})
    return {"swept": swept, "tunings": found}


if __name__ == "__main__":
    run(__doc__, work)
