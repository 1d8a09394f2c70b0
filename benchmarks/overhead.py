"""The agent's cost on the training thread: during a tuning, in a profiled step, after it, when off.

Ranks train a small model with a real service. Each step sleeps, so that it takes about 50 ms, as on
a device that computes by itself. The agent's work at the end of each step is timed on every rank;
the rank with the highest mean counts. The extra cost of a profiled step is timed on rank 0, the
only rank that profiles. A switch, with its new groups, its reducer and the votes on it, is timed by
itself. When the agent is off, nothing of it is called. The code that remains, which also runs in
the other phases, is timed in a loop. The cost of our communication hook is measured in reducer.py.

    python benchmarks/overhead.py --json overhead.json
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEP_SECONDS = 0.05
LAYERS = 80
WIDTH = 64
WATCHED_STEPS = 320
PHASES = ("tuning", "profiled", "switching", "watching", "off")
LIMITS = {
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "12",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "2",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "2",
}


@dataclass(frozen=True)
class Cost:
    """Microseconds of the training thread in each step, on one rank."""

    phase: str
    rank: int
    steps: int
    mean: float
    median: float
    p95: float
    largest: float


@dataclass(frozen=True)
class Footprint:
    """What there is beside the training itself, on rank 0."""

    phase: str
    threads: int
    groups: int
    agent_loaded: bool


def train(rank: int, folder: str, on: bool, ranks: int, results: Any) -> None:
    """One rank; puts a list of Cost and of Footprint into ``results``."""
    os.environ.update(LIMITS, BAGUA_AUTOTUNE=str(int(on)), XDG_DATA_HOME=folder)
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks // 2), GROUP_RANK=str(rank // (ranks // 2)))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    store = dist.FileStore(f"{folder}/store-{on}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    spent: list[float] = []
    profiled: list[float] = []
    switches: list[float] = []
    if on:
        time_switches(switches)
        time_the_agent(spent, switches)
        time_the_profiler(profiled)
    from bagua_client import DistributedDataParallel

    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    begin_seconds = work_seconds(model, optimizer)
    switches.clear()
    costs = []
    if on:
        while model.is_tuning:
            step(model, optimizer, begin_seconds)
        costs.append(Cost("tuning", rank, *statistics(spent)))
        costs.append(Cost("switching", rank, *statistics(switches)))
        if profiled:
            costs.append(Cost("profiled", rank, *statistics(profiled)))
        for _ in range(20):
            step(model, optimizer, begin_seconds)
        spent.clear()
        for _ in range(WATCHED_STEPS):
            step(model, optimizer, begin_seconds)
        costs.append(Cost("watching", rank, *statistics(spent)))
    else:
        costs.append(Cost("off", rank, *statistics(idle_seconds(model))))
    threads = sum(thread.name.startswith("bagua-") for thread in threading.enumerate())
    groups = len(dist.distributed_c10d._world.pg_map)
    phase = "watching" if on else "off"
    footprint = Footprint(phase, threads, groups, "bagua_client.agent" in sys.modules)
    results.put((costs, footprint if rank == 0 else None))
    dist.barrier()
    dist.destroy_process_group()


def time_switches(switches: list[float]) -> None:
    """Time the groups that each switch makes, the new reducer, and torch's own cut of it a step
    later; all fall into unmeasured steps."""
    from bagua_client.communication.communicator import Communicator
    from bagua_client.reducer.tunable_reducer import TunableReducer

    prepare = Communicator.prepare

    def timed_prepare(self: Communicator, *arguments: Any) -> None:
        began = time.perf_counter()
        prepare(self, *arguments)
        switches.append(time.perf_counter() - began)

    def timed(change: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            began = time.perf_counter()
            change(*arguments)
            if switches:
                switches[-1] += time.perf_counter() - began

        return call

    Communicator.prepare = timed_prepare  # type: ignore[method-assign]
    for name in ("_carry_out", "_let_torch_cut"):
        setattr(TunableReducer, name, timed(getattr(TunableReducer, name)))


def time_the_agent(spent: list[float], switches: list[float]) -> None:
    """Time every call of the agent at the last gradient and the end of a step, and after the
    optimizer's; not the groups made in it, which count as switching."""
    from bagua_client.agent.agent import Agent
    from bagua_client.measuring.clock import StepTimer
    from bagua_client.measuring.rank_measurement import StepBoundary

    reduction_done, after_step = Agent.reduction_done, StepBoundary._after_step
    computed = StepTimer.computed

    def timed(self: Agent) -> None:
        before, began = sum(switches), time.perf_counter()
        reduction_done(self)
        spent.append(time.perf_counter() - began - (sum(switches) - before))

    def timed_after_step(self: StepBoundary, optimizer: torch.optim.Optimizer) -> None:
        began = time.perf_counter()
        after_step(self, optimizer)
        if spent:
            spent[-1] += time.perf_counter() - began

    def timed_computed(self: StepTimer) -> None:
        began = time.perf_counter()
        computed(self)
        if spent:
            spent[-1] += time.perf_counter() - began

    Agent.reduction_done = timed  # type: ignore[method-assign]
    StepTimer.computed = timed_computed  # type: ignore[method-assign]
    StepBoundary._after_step = timed_after_step  # type: ignore[method-assign]


def time_the_profiler(profiled: list[float]) -> None:
    """Time what is recorded in each profiled step; at its two ends the agent is timed anyway."""
    from bagua_client.tunable.timeline import Timeline

    begin = Timeline.__init__

    def counted(self: Timeline, *arguments: Any) -> None:
        profiled.append(0.0)
        begin(self, *arguments)

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            profiled[-1] += time.perf_counter() - began
            return result

        return call

    Timeline.__init__ = counted  # type: ignore[method-assign]
    for name in ("tensor_ready", "bucket_starts", "_bucket_ends"):
        setattr(Timeline, name, timed(getattr(Timeline, name)))


def idle_seconds(model: Any) -> list[float]:
    """All that a step still does for us: a question as the forward pass begins, and one around the
    broadcast of buffers."""
    loops = 2_000
    question = "model._is_followed; model._is_followed"
    return [
        seconds / loops
        for seconds in timeit.repeat(question, number=loops, repeat=20, globals={"model": model})
    ]


def work_seconds(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """How long a step is to sleep."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        step(model, optimizer, 0.0)
        times.append(time.perf_counter() - began)
    longest = torch.tensor(median(times))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return max(STEP_SECONDS - longest.item(), 0.001)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, sleep_seconds: float) -> None:
    time.sleep(sleep_seconds)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def statistics(seconds: list[float]) -> tuple[int, float, float, float, float]:
    """The fields of a Cost from ``steps`` on."""
    micro = [value * 1e6 for value in seconds]
    return len(micro), mean(micro), median(micro), quantiles(micro, n=20)[-1], max(micro)


def measure(on: bool, ranks: int) -> tuple[list[Cost], Footprint]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        arguments = (folder, on, ranks, results)
        processes = [
            context.Process(target=train, args=(rank, *arguments)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        answers = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    costs = [cost for costs, _ in answers for cost in costs]
    return costs, next(footprint for _, footprint in answers if footprint is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="even number of ranks on two nodes")
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of tunings, in turns with trainings"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    costs: list[Cost] = []
    footprints: list[Footprint] = []
    for _ in range(arguments.rounds):
        for on in (True, False):
            found, footprint = measure(on, arguments.ranks)
            costs, footprints = costs + found, [*footprints, footprint]
    print(
        f"{'phase':9} {'steps':>7} {'mean us':>9} {'median':>8} {'p95':>8} {'of 50 ms':>9}  spread"
    )
    for phase in PHASES:
        rounds = [cost for cost in costs if cost.phase == phase]
        worst = sorted(rounds, key=lambda cost: cost.mean)
        # The rank with the highest mean of each round; the median of these over the rounds.
        means = [cost.mean for cost in worst[-arguments.rounds :]]
        typical = worst[-(arguments.rounds + 1) // 2]
        share = median(means) / 1e6 / STEP_SECONDS
        print(
            f"{phase:9} {typical.steps:7d} {median(means):9.2f} {typical.median:8.2f} "
            f"{typical.p95:8.1f} {share:9.5%}  {min(means):.1f} to {max(means):.1f} us"
        )
    for footprint in footprints[:2]:
        print(
            f"{footprint.phase}: {footprint.threads} threads of ours, {footprint.groups} process "
            f"group(s), agent's code loaded: {footprint.agent_loaded}"
        )
    if arguments.json:
        record = {
            "costs": [asdict(c) for c in costs],
            "footprints": [asdict(f) for f in footprints],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
