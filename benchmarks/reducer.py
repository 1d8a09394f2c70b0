"""Step time compared with stock DDP at the same bucket size.

Ours is compared in three ways: "off", wrapped with that size and not tuned, which must be as
torch's; "hook", re-cut from torch's default to that size, all buckets carried by our hook, as in a
trial that is observed in detail, or whose buckets travel in another way than torch's; "trial", re-
cut too, but torch carries the buckets, as in a trial that has many of them or is repeated. A fourth
way, "torch-hook", has torch's own hook in Python on torch's class in place of ours, and shows what
any such hook costs. Both wrappers live in the same processes and take steps (forward and backward,
no optimizer) in turns. Without a GPU: 4 processes over gloo exchange the gradient lists of
ResNet-50 and BERT-base, without the computing, so that the reducer has nowhere to hide. With one: a
real model at a batch that fills it, one process over NCCL; compiled, if asked for.

    python benchmarks/reducer.py --json reducer.json
    python benchmarks/reducer.py --models resnet50 --buckets 25 --pairs 50
    python benchmarks/reducer.py --device cuda --compile wrapper --rounds 1
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as Stock

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_client import Configuration, DistributedDataParallel
from benchmarks.support.harness import Comparison, compare, in_turns, print_table, write_json
from benchmarks.support.models import GPT2Small, GradientList, ResNet50, shapes
from benchmarks.support.recut import hooked, recut

MIB = 1024 * 1024
LISTS = {"resnet50": "resnet50", "bert": "bert-base"}
"""By the names of the simulator."""
# Batches that fill the GPU's time, with room in 40 GiB.
REAL = {"resnet50": (ResNet50, 256), "gpt2": (GPT2Small, 16)}
# Torch cuts its buckets anew after the first step.
WARM_UP_STEPS = 5
Times = tuple[list[float], list[float]]
"""Of two that are compared, in seconds, in pairs."""
Step = Callable[[nn.Module], float]
"""Makes a forward and a backward pass; answers with its seconds."""
PROCESSES = {"cpu": 4, "cuda": 1}
# The C library gives large blocks back to the kernel and gets them back page by page; which
# wrapper's steps pay for that is chance. So it keeps what it has.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
WAYS = ("off", "hook", "trial")
TORCHS = "torch-hook"
GOALS = {"off": 1.00, "hook": 1.01, "trial": 1.01, TORCHS: 1.01}
COMPILED_GOALS = {"off": 1.00, "hook": 1.02, "trial": 1.02, TORCHS: 1.02}
NOISE = 0.005
"""Less than this over its goal is the goal, where an interval may end there."""


def list_step(device: torch.device) -> Step:
    """Of a list of gradients."""
    value = torch.zeros(1, requires_grad=True, device=device)

    def step(wrapped: nn.Module) -> float:
        wrapped.zero_grad(set_to_none=True)
        dist.barrier()
        began = time.perf_counter()
        wrapped(value).backward()
        return time.perf_counter() - began

    return step


def real_step(inputs: tuple[torch.Tensor, ...]) -> Step:
    """Of a real model on the GPU, in bfloat16."""

    def step(wrapped: nn.Module) -> float:
        wrapped.zero_grad(set_to_none=True)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = wrapped(*inputs)
        loss.backward()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3

    return step


def slowest(*times: list[float]) -> Times:
    """The largest over all ranks, of each."""
    device = "cpu" if dist.get_backend() == dist.Backend.GLOO else "cuda"
    every = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    first, second = every.tolist()
    return first, second


def let_go() -> None:
    """Of the memory of wrappers that are gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def deviation(values: list[float]) -> float:
    """The median absolute deviation from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def wrap(model: nn.Module, twin: nn.Module, bucket_mib: int, way: str) -> tuple[Stock, Stock]:
    """Torch's wrapper and ours; to be re-cut, ours begins at torch's default."""
    stock = Stock(model, bucket_cap_mb=bucket_mib)
    if way == TORCHS:
        other = Stock(twin, bucket_cap_mb=bucket_mib)
        other.register_comm_hook(None, allreduce_hook)
        return stock, other
    if way == "off":
        return stock, DistributedDataParallel(twin, bucket_cap_mb=bucket_mib)
    ours = DistributedDataParallel(twin)
    hooked(ours)
    return stock, ours


def measure_lists(model: str, bucket_mib: int, way: str, options: argparse.Namespace) -> Times:
    """Step times of gradients without the computing, on the slowest rank."""
    found = shapes(LISTS[model])
    original = GradientList(found)
    pair = wrap(original, GradientList(found, like=original), bucket_mib, way)
    return slowest(*_steps(list_step(torch.device("cpu")), *pair, bucket_mib, way, options))


def measure_real(model: str, bucket_mib: int, way: str, options: argparse.Namespace) -> Times:
    """Step times on the GPU, on the slowest rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    kind, batch_size = REAL[model]
    original = kind().to(device, memory_format=torch.channels_last)
    pair = wrap(original, copy.deepcopy(original), bucket_mib, way)
    step = real_step(kind.batch(options.batch or batch_size, device))
    return slowest(*_steps(step, *pair, bucket_mib, way, options))


def _steps(
    step: Step, stock: Stock, ours: Stock, bucket_mib: int, way: str, options: argparse.Namespace
) -> Times:
    first, second = (compiled(wrapped, options.compile) for wrapped in (stock, ours))
    in_turns(lambda: step(first), lambda: step(second), WARM_UP_STEPS)
    if way in ("hook", "trial"):
        assert isinstance(ours, DistributedDataParallel)
        configuration, in_detail = Configuration(bucket_bytes=bucket_mib * MIB), way == "hook"
        recut(ours, configuration, lambda: step(second), in_detail)
    in_turns(lambda: step(first), lambda: step(second), WARM_UP_STEPS)
    return in_turns(lambda: step(first), lambda: step(second), options.pairs // options.rounds)


def compiled(wrapped: Stock, what: str | None) -> nn.Module:
    """The wrapper as it is called: with its module compiled, or itself, or neither."""
    if what == "module":
        wrapped.module.compile()
    return torch.compile(wrapped) if what == "wrapper" else wrapped  # type: ignore[return-value]


def steps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cell: torch's and our step times, each in rounds with new wrappers, as where buckets
    come to lie in memory is chance and lasts as long as the wrapper."""
    measure = measure_real if options.device == "cuda" else measure_lists
    cells = []
    for model in options.models:
        for bucket_mib in options.buckets:
            for way in options.ways:
                stock, ours = [], []
                for _ in range(options.rounds):
                    if options.compile:
                        torch.compiler.reset()
                    first, second = measure(model, bucket_mib, way, options)
                    stock, ours = stock + first, ours + second
                    let_go()
                cell = {"model": model, "bucket_mib": bucket_mib, "way": way}
                cells.append({**cell, "stock": stock, "ours": ours})
                if dist.get_rank() == 0:
                    print(f"measured {model} at {bucket_mib} MiB, {way}", flush=True)
    return cells


def run_rank(rank: int, world_size: int, folder: str, options: argparse.Namespace) -> None:
    """One process; rank 0 writes what was measured."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
    )
    found = steps(options)
    if rank == 0:
        Path(folder, "steps.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every cell, measured in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        arguments: tuple[Any, ...] = (options.processes, folder, options)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=options.processes)
        found: list[dict[str, Any]] = json.loads(Path(folder, "steps.json").read_text())
    return found


@dataclass(frozen=True)
class Cell:
    """One comparison of step times.

    Attributes:
        stock_deviation, ours_deviation: median absolute deviations from the medians, in seconds.
        goal: of the ratio of pairs.
        is_met: untuned, the interval need only reach to the goal; else the ratio itself must.
    """

    model: str
    bucket_mib: int
    way: str
    comparison: Comparison
    stock_deviation: float
    ours_deviation: float
    goal: float

    @classmethod
    def of(cls, found: Mapping[str, Any], goals: Mapping[str, float]) -> Cell:
        stock, ours, way = found["stock"], found["ours"], found["way"]
        return cls(
            model=found["model"],
            bucket_mib=found["bucket_mib"],
            way=way,
            comparison=compare(stock, ours),
            stock_deviation=deviation(stock),
            ours_deviation=deviation(ours),
            goal=goals[way],
        )

    @property
    def is_met(self) -> bool:
        if self.way == "off":
            return self.comparison.low < self.goal + NOISE
        return self.comparison.paired_ratio <= self.goal


def show(cells: list[Cell]) -> None:
    rows = []
    for cell in cells:
        found = cell.comparison
        rows.append(
            [
                cell.model,
                f"{cell.bucket_mib} MiB",
                cell.way,
                f"{found.reference_seconds * 1e3:.2f} ± {cell.stock_deviation * 1e3:.2f}",
                f"{found.other_seconds * 1e3:.2f} ± {cell.ours_deviation * 1e3:.2f}",
                f"{found.ratio:.3f}",
                f"{found.paired_ratio:.3f} ({found.low:.3f} to {found.high:.3f})",
                f"{cell.goal:.2f}",
                "yes" if cell.is_met else "no",
            ]
        )
    header = ["model", "bucket", "way", "torch ms", "ours ms", "ratio", "ratio of pairs (95 %)"]
    print_table([*header, "goal", "met"], rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--models", nargs="+", choices=sorted({*LISTS, *REAL}))
    parser.add_argument("--buckets", nargs="+", type=int, default=[1, 25, 100], help="sizes in MiB")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, TORCHS], default=WAYS)
    parser.add_argument("--compile", choices=("module", "wrapper"), help="compile this with torch")
    parser.add_argument(
        "--pairs", type=int, default=30, help="measured steps of each wrapper (default: 30)"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds, each with new wrappers (default: 4)"
    )
    parser.add_argument(
        "--batch", type=int, default=0, help="batch size of real models; 0: one that fills the GPU"
    )
    parser.add_argument(
        "--processes", type=int, help="number of ranks; with --device cuda each has its own GPU"
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.processes = options.processes or PROCESSES[options.device]
    known = REAL if options.device == "cuda" else LISTS
    options.models = options.models or list(known)
    unknown = sorted(set(options.models) - set(known))
    if unknown:
        parser.error(
            f"no model {', '.join(unknown)} on {options.device}; there are {', '.join(known)}"
        )
    if options.pairs < options.rounds:
        parser.error("every round needs a pair")
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("BAGUA_AUTOTUNE", None)
    os.environ.update(ALLOCATOR)
    goals = COMPILED_GOALS if options.compile else GOALS
    cells = [Cell.of(found, goals) for found in run(options)]
    show(cells)
    if options.json:
        found = [{**asdict(cell), "is_met": cell.is_met} for cell in cells]
        write_json(
            options.json, {"benchmark": "reducer", "compile": options.compile, "cells": found}
        )


if __name__ == "__main__":
    main()
