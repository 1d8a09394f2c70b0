"""Step time compared with stock DDP at the same bucket size, and the cost of a reducer swap.

Ours is compared in two ways: "off", wrapped with that size and not tuned, which must be as torch's;
"hook", re-cut from torch's default to that size, all buckets carried by our hook, as in a job that
is tuned. Both wrappers live in the same processes and take steps (forward and backward, no
optimizer) in turns. Without a GPU: 4 processes over gloo exchange the gradient lists of ResNet-50
and BERT-base, without the computing, so that the reducer has nowhere to hide. With one: a real
model at a batch that fills it, one process over NCCL; compiled, if asked for.

A swap is timed by itself: the vote, the new reducer, and a step later torch's own cut of it. On a
GPU, so is how much memory that and the wrapping take.

    python benchmarks/reducer.py --json reducer.json
    python benchmarks/reducer.py --models resnet50 --buckets 25 --pairs 50 --parts steps
    python benchmarks/reducer.py --device cuda --compile wrapper --rounds 1
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Comparison, compare, in_turns, print_table, write_json
from models import GradientList
from recut import hooked, recut
from stepping import (
    LISTS,
    REAL,
    WARM_UP_STEPS,
    Step,
    Times,
    deviation,
    let_go,
    list_step,
    real_step,
    slowest,
)
from swap import Swap, memory, show_memory, show_swaps, swaps, tensor_cost
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel

MIB = 1024 * 1024
PROCESSES = {"cpu": 4, "cuda": 1}
# The C library gives large blocks back to the kernel and gets them back page by page; which
# wrapper's steps pay for that is chance. So it keeps what it has.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
WAYS = ("off", "hook")
PARTS = ("steps", "swaps", "memory")
GOALS = {"off": 1.00, "hook": 1.01}
COMPILED_GOALS = {"off": 1.00, "hook": 1.02}
NOISE = 0.005
"""Less than this over its goal is the goal, where an interval may end there."""


def wrap(model: nn.Module, twin: nn.Module, bucket_mib: int, way: str) -> tuple[Stock, Stock]:
    """Torch's wrapper and ours; to be re-cut, ours begins at torch's default."""
    stock = Stock(model, bucket_cap_mb=bucket_mib)
    if way == "off":
        return stock, DistributedDataParallel(twin, bucket_cap_mb=bucket_mib)
    ours = DistributedDataParallel(twin)
    hooked(ours)
    return stock, ours


def measure_lists(model: str, bucket_mib: int, way: str, options: argparse.Namespace) -> Times:
    """Step times of gradients without the computing, on the slowest rank."""
    shapes = LISTS[model]()
    original = GradientList(shapes)
    pair = wrap(original, GradientList(shapes, like=original), bucket_mib, way)
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
    if way == "hook":
        assert isinstance(ours, DistributedDataParallel)
        recut(ours, Configuration(bucket_bytes=bucket_mib * MIB), lambda: step(second))
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


def run_rank(
    rank: int, world_size: int, folder: str, part: str, options: argparse.Namespace
) -> None:
    """One process: all of a part; rank 0 writes what was measured."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
        torch.backends.cudnn.benchmark = True
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store-{part}",
        rank=rank,
        world_size=world_size,
    )
    found = {"steps": steps, "swaps": swaps, "memory": memory}[part](options)
    if rank == 0:
        Path(folder, f"{part}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(part: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A part in processes of its own. Swaps are timed on no more ranks than there are cores."""
    world_size = options.processes
    if part == "swaps" and options.device == "cpu":
        world_size = min(world_size, max(os.cpu_count() or 1, 2))
    with tempfile.TemporaryDirectory() as folder:
        arguments: tuple[Any, ...] = (world_size, folder, part, options)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=world_size)
        found: list[dict[str, Any]] = json.loads(Path(folder, f"{part}.json").read_text())
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


def show_steps(cells: list[Cell]) -> None:
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


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts and print each as a table; what the JSON says."""
    result: dict[str, Any] = {"benchmark": "reducer", "compile": options.compile}
    if "steps" in options.parts:
        goals = COMPILED_GOALS if options.compile else GOALS
        cells = [Cell.of(found, goals) for found in run("steps", options)]
        show_steps(cells)
        result["cells"] = [{**asdict(cell), "is_met": cell.is_met} for cell in cells]
    if "swaps" in options.parts:
        swapped = [Swap.of(found) for found in run("swaps", options)]
        show_swaps(swapped)
        result["swaps"] = [{**asdict(swap), "goal_ms": swap.goal_ms} for swap in swapped]
        result["swap_ms"], result["swap_us_per_tensor"] = tensor_cost(swapped)
    if "memory" in options.parts:
        result["memory"] = run("memory", options)
        show_memory(result["memory"])
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--models", nargs="+", choices=sorted({*LISTS, *REAL}))
    parser.add_argument("--buckets", nargs="+", type=int, default=[1, 25, 100], help="sizes in MiB")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, help="parts to measure; 'memory' needs a GPU"
    )
    parser.add_argument("--compile", choices=("module", "wrapper"), help="compile this with torch")
    parser.add_argument(
        "--pairs", type=int, default=30, help="measured steps of each wrapper (default: 30)"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds, each with new wrappers (default: 4)"
    )
    parser.add_argument(
        "--swaps", type=int, default=40, help="swaps measured for each gradient list (default: 40)"
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
    options.parts = options.parts or (PARTS if options.device == "cuda" else PARTS[:2])
    known = REAL if options.device == "cuda" else LISTS
    options.models = options.models or list(known)
    unknown = sorted(set(options.models) - set(known))
    if unknown:
        parser.error(
            f"no model {', '.join(unknown)} on {options.device}; there are {', '.join(known)}"
        )
    if options.device == "cpu" and "memory" in options.parts:
        parser.error("the memory of a CPU is not measured")
    if options.pairs < options.rounds:
        parser.error("every round needs a pair")
    return options


def main() -> None:
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("BAGUA_AUTOTUNE", None)
    os.environ.update(ALLOCATOR)
    result = report(options)
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
