"""What a slow rank costs the others, under stock DDP and where no rank waits for another.

    torchrun --nproc-per-node 4 benchmarks/slow_rank.py

Each rank computes for so long (it sleeps: a GPU would), the last one three times as long. "own
speed" is that of computing alone, measured in the same process in turns; a rank's figure is its
steps per second as a share of that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from harness import print_table, write_json
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bagua_client import DistributedDataParallel
from bagua_client.algorithms import AsyncModelAverageAlgorithm

SLOWER = 3
GOAL = 0.95


def speed(step: Callable[[], object], seconds: float) -> float:
    """Steps per second of this rank."""
    began, steps = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        step()
        steps += 1
    return steps / (time.perf_counter() - began)


def stepper(model: nn.Module, pause_seconds: float) -> Callable[[], None]:
    """A step that computes for so long."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.ones(1, next(model.parameters()).shape[1])

    def step() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        time.sleep(pause_seconds)
        loss.backward()
        optimizer.step()

    return step


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """This rank's shares of its own speed, of each round."""
    width = int((options.megabytes * 1e6 / 4) ** 0.5)
    is_slow = dist.get_rank() == dist.get_world_size() - 1
    pause = options.step_seconds * (SLOWER if is_slow else 1)
    asynchronous = DistributedDataParallel(nn.Linear(width, width), algorithm="async")
    algorithm = asynchronous.algorithm
    assert isinstance(algorithm, AsyncModelAverageAlgorithm)
    alone = stepper(nn.Linear(width, width), pause)
    apart = stepper(asynchronous, pause)
    # Stock DDP has all ranks make as many steps: a block of it is counted, not timed.
    together = stepper(Stock(nn.Linear(width, width)), pause)
    for step in (alone, apart, together):
        for _ in range(3):
            step()
    shares: dict[str, list[float]] = {"stock DDP": [], "async": []}
    count = max(3, int(options.block_seconds / options.step_seconds / SLOWER))
    for _ in range(options.rounds):
        dist.barrier()
        own = speed(alone, options.block_seconds)
        dist.barrier()
        algorithm.resume(asynchronous)
        shares["async"].append(speed(apart, options.block_seconds) / own)
        algorithm.abort(asynchronous)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            together()
        shares["stock DDP"].append(count / (time.perf_counter() - began) / own)
    return shares


def report(every: list[dict[str, list[float]]]) -> None:
    """The table, of all ranks' shares, and whether the goal is met."""
    rows = [
        [f"rank {number}" + (" (slow)" if number == len(every) - 1 else "")]
        + [f"{median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in of.values()]
        for number, of in enumerate(every)
    ]
    print_table(["share of its own speed", *every[0]], rows)
    lowest = min(median(of["async"]) for of in every[:-1])
    word = "met" if lowest >= GOAL else "MISSED"
    print(f"{word}: beside a slow rank the others keep {GOAL} of their speed: {lowest:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=2.0, help="size of the gradients")
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--block-seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    every: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, measure(options))
    if dist.get_rank() == 0:
        report(every)
        if options.json:
            write_json(options.json, {"command": sys.argv, "shares": every})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
