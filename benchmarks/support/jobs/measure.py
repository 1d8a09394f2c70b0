"""A rank of a job that measures step times under several wrappers and configurations, in turns.

    torchrun --nproc-per-node 2 benchmarks/support/jobs/measure.py SPEC OUT

SPEC is a JSON file: a workload (see ``benchmarks/support/workloads``) and

    {"arms": [{"name": "default", "kind": "stock", "bucket_mib": null},
              {"name": "flat", "kind": "ours", "configuration": {"bucket_bytes": 10485760}},
              {"name": "compute", "kind": "compute"}],
     "rounds": 3, "steps": 3, "warmup_steps": 1}

With ``"sharding"`` in the workload (``fully_shard``, ``zero``) the kinds are ``sharded``, the model
as torch or DeepSpeed has it (``"tune": true``: after a call of ``tune()``, without a tuning), and
``sharded, ours``, with what its configuration names and all else as the model's default.

In each round every arm has one block of steps; the order is another one in each. Rank 0 writes
OUT: of each arm, by round, the seconds of its steps on the slowest rank. With

    {"run_off": {"rounds": 6, "steps": 4, "cell": {...}, "effort": {...}}}

in SPEC too, the arms that ``benchmarks/support/cells`` then chooses for the cell are measured once
more, and OUT is ``{"sweep": ..., "run_off": ...}``. With
``"groups": [["flat", "default"], ["compute"]]`` in the place of cell and effort it is the fastest
of each group. With ``"profiled_steps": 3`` beside them each of these arms then makes so many steps
more under torch's profiler, on GPUs only, and OUT also has ``"profile"``: by arm, what rank 0's GPU
was busy with in a step, in seconds (see ``benchmarks/support/cells/occupancy.py``).
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bagua_client import Configuration, DistributedDataParallel, tune
from bagua_client.algorithms import QAdamAlgorithm, QAdamOptimizer
from bagua_client.reducer.tunable_reducer import TunableReducer
from benchmarks.support.cells.cell import Cell, Effort, run_off_arms
from benchmarks.support.cells.occupancy import of_trace, traced
from benchmarks.support.harness import spread
from benchmarks.support.jobs.rank import TimedSteps, gradients, peak_bytes, run, sent_bytes
from benchmarks.support.workloads import Training, training

# Torch cuts its buckets anew after the first step.
SETTLING_STEPS = 3


@dataclass(frozen=True)
class Arm:
    """What is measured under one name: a step, and what brings it about before each block."""

    step: Callable[[], None]
    prepare: Callable[[], object] = lambda: None


def build(specs: list[Mapping[str, Any]], workload: Training) -> dict[str, Arm]:
    """By name. Torch's wrapper has its buckets for life, one of ours serves all configurations; it
    is as in a tuned job, where all buckets travel by our hook."""
    arms: dict[str, Arm] = {}
    ours: Any = None
    for spec in specs:
        if spec["kind"] == "compute":
            arms[spec["name"]] = Arm(workload.stepper(workload.model()))
        elif spec["kind"] == "sharded":
            model = workload.model()
            arms[spec["name"]] = Arm(_settled(workload, tune(model) if spec["tune"] else model))
        elif spec["kind"] == "sharded, ours":
            if ours is None:
                ours = tune(workload.model())
                step = _settled(workload, ours)
                hooked(ours)
                default = ours.configuration.to_json()
            configuration = Configuration.from_json({**default, **spec["configuration"]})
            arms[spec["name"]] = Arm(step, partial(recut, ours, configuration, step))
        elif spec["kind"] == "stock":
            # Torch begins with a bucket of 1 MiB only if no size is given.
            size = {} if spec["bucket_mib"] is None else {"bucket_cap_mb": spec["bucket_mib"]}
            arms[spec["name"]] = Arm(_settled(workload, Stock(workload.model(), **size)))
        elif spec["kind"] == "compressed":
            compressed = Stock(workload.model())
            on_gloo = dist.get_backend() == dist.Backend.GLOO
            # Torch reads annotations, which are texts here.
            over_gloo = lambda _, bucket: bf16_over_gloo(bucket)  # noqa: E731
            compressed.register_comm_hook(None, over_gloo if on_gloo else bf16_compress_hook)
            arms[spec["name"]] = Arm(_settled(workload, compressed))
        elif spec["kind"] == "powersgd":
            # Its callbacks start collectives from gloo's threads, where two buckets change places.
            on_gloo = dist.get_backend() == dist.Backend.GLOO
            low_rank = Stock(workload.model(), bucket_cap_mb=10_000 if on_gloo else None)
            low_rank.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)
            arms[spec["name"]] = Arm(_settled(workload, low_rank))
        elif spec["kind"] == "qadam":
            arms[spec["name"]] = Arm(_with_qadam(workload, spec["configuration"]))
        elif spec["kind"] == "ours":
            if ours is None:
                ours = DistributedDataParallel(workload.model())
                hooked(ours)
                step = _settled(workload, ours)
            configuration = Configuration.from_json(spec["configuration"])
            arms[spec["name"]] = Arm(step, partial(recut, ours, configuration, step))
        else:
            raise ValueError(f"arm {spec['name']}: there is no kind {spec['kind']}")
    return arms


def hooked(wrapped: DistributedDataParallel) -> TunableReducer:
    """What is re-cut of ``wrapped``, observed in detail. All ranks must call it together, between
    two steps."""
    wrapped.reconfigure(wrapped.configuration)
    tunable = wrapped._tunable  # nothing public leads there
    assert tunable is not None
    tunable.attach()
    return tunable


def recut(
    wrapped: DistributedDataParallel, configuration: Configuration, step: Callable[[], object]
) -> int:
    """Put ``configuration`` into force and make steps until torch has cut the buckets for good.

    Returns:
        How many steps that were.

    Raises:
        RuntimeError: the model cannot run under it.
    """
    if not wrapped.reconfigure(configuration):
        raise RuntimeError(f"the model cannot run under {configuration}")
    tunable = wrapped._tunable
    assert tunable is not None
    steps = 0
    while not tunable.is_settled:
        step()
        steps += 1
    return steps


def bf16_over_gloo(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's ``bf16_compress_hook``, which it refuses to register over gloo."""
    wire = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(wire, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _with_qadam(workload: Training, values: Mapping[str, Any]) -> Callable[[], None]:
    """With an optimizer of its own, whose warm-up is over."""
    model = workload.model()
    optimizer = QAdamOptimizer(model.parameters(), warmup_steps=1)
    wrapped = DistributedDataParallel(model, algorithm=QAdamAlgorithm(optimizer))
    forth_and_back = workload.stepper(wrapped)

    def step() -> None:
        forth_and_back()
        optimizer.step()

    step()
    recut(wrapped, Configuration.from_json(values), step)
    return step


def _settled(workload: Training, wrapped: nn.Module) -> Callable[[], None]:
    step = workload.stepper(wrapped)
    for _ in range(SETTLING_STEPS):
        step()
    return step


def block(
    arm: Arm, steps: int, warmup_steps: int, device: torch.device
) -> tuple[list[float], float, int]:
    """Seconds of each step but the first ``warmup_steps``, on the slowest rank; the bytes that a
    host sends in one; and the peak of this rank's GPU memory."""
    arm.prepare()
    peak_bytes(device)
    dist.barrier(device_ids=None if device.index is None else [device.index])
    if device.type == "cuda":
        torch.cuda.synchronize()
    sent = sent_bytes()
    # Also where some were made already: in the first one a GPU waits for its host.
    for _ in range(warmup_steps):
        arm.step()
    timed = TimedSteps(arm.step, device)
    for _ in range(steps):
        timed()
    seconds = timed.seconds()
    return seconds, (sent_bytes() - sent) / (warmup_steps + steps), peak_bytes(device)


def measure(spec: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What OUT says."""
    began = time.monotonic()
    workload = training(spec, dist.get_rank(), device)
    arms = build(spec["arms"], workload)
    sizes = gradients(workload.model())
    gc.collect()
    gc.freeze()

    def stage(chosen: Mapping[str, Arm], rounds: int, steps: int) -> dict[str, Any]:
        nonlocal began
        times: dict[str, list[list[float]]] = {name: [] for name in chosen}
        sent: dict[str, list[float]] = {name: [] for name in chosen}
        peaks: dict[str, int] = {}
        for number in range(rounds):
            order = list(chosen)
            random.Random(f"{spec.get('seed', 0)}/{number}").shuffle(order)
            for name in order:
                seconds, bytes_, peak = block(chosen[name], steps, spec["warmup_steps"], device)
                times[name].append(seconds)
                sent[name].append(bytes_)
                peaks[name] = max(peak, peaks.get(name, 0))
        took = {"seconds": time.monotonic() - began}
        found = {"arms": times, "sent_bytes": sent, "peak_bytes": peaks, **sizes, **took}
        began = time.monotonic()
        return found

    sweep = stage(arms, spec["rounds"], spec["steps"])
    if "run_off" not in spec:
        return sweep
    again, times = spec["run_off"], {name: spread(of) for name, of in sweep["arms"].items()}
    # All ranks know the same times, and choose the same.
    if "groups" in again:
        names = [min(group, key=lambda name: times[name].seconds) for group in again["groups"]]
    else:
        cell, effort = Cell.from_json(again["cell"]), Effort(**again["effort"])
        names = [arm["name"] for arm in run_off_arms(spec["arms"], times, cell, effort)]
    chosen = {name: arms[name] for name in names}
    found = {"sweep": sweep, "run_off": stage(chosen, again["rounds"], again["steps"])}
    if "profiled_steps" in again:
        found["profile"] = _profile(chosen, again["profiled_steps"], spec["warmup_steps"])
    return found


def _profile(arms: Mapping[str, Arm], steps: int, warmup_steps: int) -> dict[str, Any]:
    """By arm, what rank 0's GPU was busy with in a step; None: not known, also on other ranks."""
    found: dict[str, Any] = {}
    for name, arm in arms.items():
        arm.prepare()
        reads = dist.get_rank() == 0
        trace = traced(arm.step, steps, warmup_steps, reads)
        account = of_trace(trace, steps) if reads else None
        found[name] = None if account is None else asdict(account)
    return found


def main() -> None:
    os.environ.pop("BAGUA_AUTOTUNE", None)  # else the client would tune, too
    run(__doc__, measure)


if __name__ == "__main__":
    main()
