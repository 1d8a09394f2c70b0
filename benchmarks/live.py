"""Tunes one real training, then measures its default and the configuration kept in turns.

Each process has one GPU and NCCL, or a CPU core and gloo. Rank 0 starts the service. When the
tuning has ended, the default and what was kept are put into force in turns, with the steps after a
switch left out, and the medians of these blocks are compared.

    torchrun --nproc-per-node 2 benchmarks/live.py --model gpt2 --compile wrapper --json live.json
    python -m torch.distributed.run --nproc-per-node 2 benchmarks/live.py --model tiny --device cpu
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from harness import compare, print_table, write_json
from recut import recut
from stepping import REAL, Step, real_step
from torch import nn

from bagua_client import Configuration, DistributedDataParallel

MOST_STEPS = 5000
BLOCKS = 6


class _Tiny(nn.Module):
    """For a processor: enough layers that there is something to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values).relu()
        return values.mean()


def tiny_step(wrapped: nn.Module) -> float:
    """On the CPU."""
    began = time.perf_counter()
    wrapped(torch.ones(32, 256)).backward()
    return time.perf_counter() - began


def model_and_step(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Step]:
    """What is trained."""
    if options.model == "tiny":
        return _Tiny(), tiny_step
    kind, batch_size = REAL[options.model]
    model = kind().to(device, memory_format=torch.channels_last)
    return model, real_step(kind.batch(options.batch or batch_size, device))


def tuned(wrapped: DistributedDataParallel, step: Callable[[], float]) -> int:
    """Train until the tuning has ended; after so many steps."""
    for steps in range(1, MOST_STEPS):
        step()
        if not wrapped.is_tuning:
            return steps
    raise RuntimeError(f"still tuning after {MOST_STEPS} steps")


def block(
    wrapped: DistributedDataParallel,
    configuration: Configuration,
    step: Callable[[], float],
    steps: int,
) -> float:
    """The median step time under ``configuration``, on the slowest rank, in seconds."""
    recut(wrapped, configuration, step)
    step()
    times = torch.tensor(median(step() for _ in range(steps)), device=wrapped.device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[*REAL, "tiny"], default="gpt2")
    parser.add_argument(
        "--batch", type=int, help="batch size of each process (default: one that fills a GPU)"
    )
    parser.add_argument("--compile", choices=["module", "wrapper"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--block-steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    for told in ("agent", "reporter"):
        logging.getLogger(f"bagua_client.{told}").setLevel(logging.INFO)
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    run(options, device)
    dist.destroy_process_group()


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Tune, compare, print; in an initialised process group."""
    torch.manual_seed(0)
    model, one_step = model_and_step(options, device)
    os.environ["BAGUA_AUTOTUNE"] = "1"
    wrapped = DistributedDataParallel(model)
    if options.compile == "module":
        wrapped.module.compile()
    called: nn.Module = wrapped
    if options.compile == "wrapper":
        called = torch.compile(wrapped)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    default = wrapped.configuration

    def step() -> float:
        seconds = one_step(called)
        optimizer.step()
        optimizer.zero_grad()
        return seconds

    steps = tuned(wrapped, step)
    for _ in range(3):
        step()
    kept = wrapped.configuration
    pairs = [
        [block(wrapped, each, step, options.block_steps) for each in (default, kept)]
        for _ in range(BLOCKS)
    ]
    if dist.get_rank() == 0:
        report(options, default, kept, steps, pairs)


def report(
    options: argparse.Namespace,
    default: Configuration,
    kept: Configuration,
    steps: int,
    pairs: list[list[float]],
) -> None:
    """A table, and JSON if it is wanted."""
    found = compare([first for first, _ in pairs], [second for _, second in pairs])
    row = {
        "model": options.model,
        "compiled": options.compile or "no",
        "kept": str(kept),
        "steps of tuning": str(steps),
        "default ms": f"{found.reference_seconds * 1e3:.2f}",
        "kept ms": f"{found.other_seconds * 1e3:.2f}",
        "kept / default (95 %)": f"{found.paired_ratio:.3f} ({found.low:.3f} to {found.high:.3f})",
    }
    print_table(list(row), [list(row.values())])
    if options.json:
        result = {**row, "default": str(default), "blocks_seconds": pairs}
        write_json(options.json, {"live": result})


if __name__ == "__main__":
    main()
