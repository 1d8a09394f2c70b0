"""The step of a fused optimizer beside the plain one, and beside torch's own kernels.

    python -m benchmarks.fused_optimizer                          # on the GPU, if there is one
    python -m benchmarks.fused_optimizer --device cpu --json fused.json
    python -m benchmarks.fused_optimizer --device cpu --full --models bert    # up to 5 GiB

Two models by the shapes of their parameters: BERT-base's 199 (on a CPU at a quarter of its width,
unless --full), and 800 small ones of 32 and 1,024 elements. An optimizer written as a loop, as it
is and fused; torch's Adam and RMSprop in each of torch's ways, and with ``replace_step=True``.
Gradients lie where autograd would leave them: each in memory of its own. On a CPU one thread, as
torchrun has it.

Each pair takes turns; one measurement is some steps, the GPU waited for before and after them. The
speed-up is the median of the pairs' ratios, with its 95 % interval. Goals: the loop becomes 3 times
as fast on a GPU, and 1.3 times on a CPU with small tensors; no other row falls below 0.95.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Adam, Optimizer, RMSprop

from bagua_client.optimizers import fuse_optimizer
from benchmarks.harness import compare, in_turns, print_table, write_json
from tests.client.optimizers.loops import LoopAdam

Made = Callable[[list[Parameter]], Optimizer]
WARM_UP_STEPS = 11  # the first, second and tenth are tried on copies before
SECONDS_EACH = 0.05
LOOP_GOALS = {("cuda", "bert"): 3.0, ("cuda", "small"): 3.0, ("cpu", "small"): 1.3}
LEAST = 0.95


def fused(made: Made) -> Made:
    return lambda parameters: fuse_optimizer(made(parameters), replace_step=True)


# What is compared: its name, the reference, and ours.
ARMS: tuple[tuple[str, Made, Made], ...] = (
    ("loop-written Adam", LoopAdam, fused(LoopAdam)),
    ("Adam(foreach=False)", lambda p: Adam(p, foreach=False), fused(Adam)),
    ("Adam(foreach=True)", lambda p: Adam(p, foreach=True), fused(Adam)),
    ("Adam(fused=True)", lambda p: Adam(p, fused=True), fused(Adam)),
    ("RMSprop(foreach=False)", lambda p: RMSprop(p, foreach=False), fused(RMSprop)),
    ("RMSprop(foreach=True)", lambda p: RMSprop(p, foreach=True), fused(RMSprop)),
)


def bert(hidden: int) -> list[tuple[int, ...]]:
    """Shapes of the parameters of BERT-base, whose hidden size is 768 (Devlin et al., 2018)."""
    vector, square = (hidden,), (hidden, hidden)
    embeddings = [(30522, hidden), (512, hidden), (2, hidden), vector, vector]
    attention = [square, vector] * 4 + [vector, vector]
    outer = [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), vector, vector, vector]
    return [*embeddings, *(attention + outer) * 12, square, vector]


def small() -> list[tuple[int, ...]]:
    return [(32, 32), (32,)] * 400


def seconds_of(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Of a step; the mean of some in a row."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / steps


def compared(
    shapes: Sequence[tuple[int, ...]], pair: tuple[Made, Made], pairs: int, device: torch.device
) -> dict[str, Any]:
    """Step times of two optimizers of the same parameters and gradients."""
    torch.manual_seed(0)
    gradients = [torch.randn(shape, device=device) for shape in shapes]
    steps = []
    for made in pair:
        parameters = [Parameter(gradient * 0.1) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer = made(parameters)
        for _ in range(WARM_UP_STEPS):
            optimizer.step()
        steps.append(optimizer.step)
    once = min(seconds_of(step, 1, device) for step in steps)
    count = max(1, min(50, math.ceil(SECONDS_EACH / once)))
    reference, ours = (lambda step=step: seconds_of(step, count, device) for step in steps)
    found = compare(*in_turns(reference, ours, pairs))
    return {
        "reference_milliseconds": found.reference_seconds * 1e3,
        "milliseconds": found.other_seconds * 1e3,
        "speedup": 1 / found.paired_ratio,
        "interval": [1 / found.high, 1 / found.low],
        "steps_each": count,
    }


def goal(device: str, model: str, arm: str) -> float:
    """The least speed-up that is asked for."""
    if arm == ARMS[0][0]:
        return LOOP_GOALS.get((device, model), LEAST)
    return LEAST


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="+", choices=("bert", "small"), default=["bert", "small"])
    parser.add_argument("--full", action="store_true", help="BERT-base at its width on a CPU, too")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--json", type=Path, help="write the result there too")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)
    hidden = 768 if options.full or device.type == "cuda" else 192
    shapes = {"bert": bert(hidden), "small": small()}
    rows = []
    for model in options.models:
        for arm, *pair in ARMS:
            row = compared(shapes[model], (pair[0], pair[1]), options.pairs, device)
            least = goal(device.type, model, arm)
            rows.append({"model": model, "reference": arm, "goal": least, **row})
            gc.collect()
    print_table(
        ["model", "reference", "its ms", "ours ms", "speed-up", "95 %", "goal", ""],
        [
            [
                row["model"],
                row["reference"],
                f"{row['reference_milliseconds']:.3f}",
                f"{row['milliseconds']:.3f}",
                f"{row['speedup']:.2f}",
                "{:.2f} to {:.2f}".format(*row["interval"]),
                str(row["goal"]),
                "met" if row["speedup"] >= row["goal"] else "MISSED",
            ]
            for row in rows
        ],
    )
    if options.json:
        result = {"benchmark": "fused optimizer", "device": device.type, "hidden": hidden}
        write_json(options.json, {**result, "rows": rows})
    return 0 if all(row["speedup"] >= row["goal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
