"""Step time against torch's DistributedDataParallel at the same bucket size.

Both wrappers live in the same processes and take steps (forward and backward, no optimizer) in
turns. Without a GPU: 4 processes over gloo exchange the gradient lists of ResNet-50 and BERT-base,
without the computing, so that the reducer has nowhere to hide. With one: a real model at a batch
that fills it, one process over NCCL.

    python benchmarks/reducer.py --json reducer.json
    python benchmarks/reducer.py --models resnet50 --buckets 25 --pairs 50
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Comparison, compare, in_turns, print_table, write_json
from models import GPT2Small, GradientList, ResNet50, bert_base_shapes, resnet50_shapes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel

MIB = 1024 * 1024
PROCESSES = 4
# The order of gradients is recorded in the first steps and the buckets are cut anew after them.
WARM_UP_STEPS = 5
# Where buckets come to lie in memory is chance and lasts as long as the wrapper: make new ones.
ROUNDS = 4
LISTS = {"resnet50": resnet50_shapes, "bert": bert_base_shapes}
# The C library gives large blocks back to the kernel and gets them back page by page; which
# wrapper's steps pay for that is chance. So it keeps what it has.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
# Batches that fill the GPU's time, with room in 40 GiB.
REAL = {"resnet50": (ResNet50, 256), "gpt2": (GPT2Small, 16)}


def wrap(model: nn.Module, twin: nn.Module, bucket_mib: int) -> tuple[nn.Module, nn.Module]:
    """Torch's wrapper and ours, with buckets of the same size and everything else alike."""
    stock = Stock(model, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True)
    ours = DistributedDataParallel(twin, gradient_as_bucket_view=True)
    ours.reconfigure(Configuration(bucket_bytes=bucket_mib * MIB))
    return stock, ours


def measure_lists(model: str, bucket_mib: int, pairs: int) -> tuple[list[float], list[float]]:
    """Step times of the slowest rank, in seconds: torch's and ours."""
    shapes = LISTS[model]()
    original = GradientList(shapes)
    stock, ours = wrap(original, GradientList(shapes, like=original), bucket_mib)
    value = torch.zeros(1, requires_grad=True)

    def step(wrapped: nn.Module) -> float:
        wrapped.zero_grad(set_to_none=True)
        dist.barrier()
        began = time.perf_counter()
        wrapped(value).backward()
        return time.perf_counter() - began

    return _slowest(*_steps(step, stock, ours, pairs))


def measure_real(model: str, bucket_mib: int, pairs: int) -> tuple[list[float], list[float]]:
    """Step times on the GPU, in seconds: torch's and ours."""
    device = torch.device("cuda", torch.cuda.current_device())
    kind, batch_size = REAL[model]
    original = kind().to(device, memory_format=torch.channels_last)
    stock, ours = wrap(original, copy.deepcopy(original), bucket_mib)
    inputs = kind.batch(batch_size, device)

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

    return _steps(step, stock, ours, pairs)


def _steps(
    step: Callable[[nn.Module], float], stock: nn.Module, ours: nn.Module, pairs: int
) -> tuple[list[float], list[float]]:
    in_turns(lambda: step(stock), lambda: step(ours), WARM_UP_STEPS)
    return in_turns(lambda: step(stock), lambda: step(ours), pairs)


def _slowest(*times: list[float]) -> tuple[list[float], ...]:
    every = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return tuple(every.tolist())


def run_rank(rank: int, world_size: int, folder: str, options: argparse.Namespace) -> None:
    """One process: every cell in turn; rank 0 writes what was measured."""
    cuda = options.device == "cuda"
    if cuda:
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
    )
    measure = measure_real if cuda else measure_lists
    for model in options.models:
        for bucket_mib in options.buckets:
            stock, ours = [], []
            for _ in range(ROUNDS):
                for times, new in zip(
                    (stock, ours), measure(model, bucket_mib, options.pairs // ROUNDS), strict=True
                ):
                    times += new
            if rank == 0:
                result = {"model": model, "bucket_mib": bucket_mib, "stock": stock, "ours": ours}
                Path(folder, f"{model}-{bucket_mib}.json").write_text(json.dumps(result))
                print(f"measured {model} at {bucket_mib} MiB", flush=True)
            if cuda:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


def show(cells: list[tuple[str, int, Comparison]], goal: float) -> None:
    rows = [
        [
            model,
            f"{bucket_mib} MiB",
            f"{cell.reference_seconds * 1e3:.2f}",
            f"{cell.other_seconds * 1e3:.2f}",
            f"{cell.ratio:.3f}",
            f"{cell.paired_ratio:.3f} ({cell.low:.3f} to {cell.high:.3f})",
            "yes" if cell.paired_ratio <= goal else "no",
        ]
        for model, bucket_mib, cell in cells
    ]
    header = ["model", "bucket", "torch ms", "ours ms", "ratio", "ratio of pairs (95 %)"]
    print_table([*header, f"at most {goal}"], rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="a GPU where there is one")
    parser.add_argument("--models", nargs="+", choices=sorted({*LISTS, *REAL}))
    parser.add_argument("--buckets", nargs="+", type=int, default=[1, 25, 100], help="in MiB")
    parser.add_argument(
        "--pairs", type=int, help="measured steps of each (default: 30)", default=30
    )
    parser.add_argument("--json", type=Path, help="write the result there too")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    known = REAL if options.device == "cuda" else LISTS
    options.models = options.models or list(known)
    unknown = sorted(set(options.models) - set(known))
    if unknown:
        parser.error(
            f"no model {', '.join(unknown)} on {options.device}; there are {', '.join(known)}"
        )
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("BAGUA_AUTOTUNE", None)
    os.environ.update(ALLOCATOR)
    world_size, goal = (1, 1.01) if options.device == "cuda" else (PROCESSES, 1.02)
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        arguments: tuple[Any, ...] = (world_size, folder, options)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=world_size)
        for model in options.models:
            for bucket_mib in options.buckets:
                times = json.loads(Path(folder, f"{model}-{bucket_mib}.json").read_text())
                cells.append((model, bucket_mib, compare(times["stock"], times["ours"])))
    show(cells, goal)
    if options.json:
        results = [{"model": m, "bucket_mib": b, **asdict(cell)} for m, b, cell in cells]
        write_json(options.json, {"benchmark": "reducer", "goal": goal, "cells": results})


if __name__ == "__main__":
    main()
