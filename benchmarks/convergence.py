"""Convergence under each algorithm and with 16 bits on the wire, compared with plain averaging.

The examples' trainings run with each of them, several seeds each.

    torchrun --nproc-per-node 4 benchmarks/convergence.py --json all.json
    torchrun --nproc-per-node 2 benchmarks/convergence.py --ways all_reduce bf16 fp16
    torchrun --nproc-per-node 2 benchmarks/convergence.py --device cuda --steps 500 --seeds 5

"loss" is that of the last steps' batches, "accuracy" that on images, or text, that were not trained
on, with replicas that trained apart averaged first; means over all ranks. qadam is an optimizer of
its own, so it stands beside "adam": the same, whose warm-up never ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from benchmarks.support.harness import print_table, write_json
from examples.characters import CONTEXT, CharacterModel, topics
from examples.digits import digits, resnet18

WARM_UP_SHARE = 0.25
"""Of qadam's steps."""
ASYNC_INTERVAL_MS = 100
LAST_STEPS = 20
BESIDE = {"qadam": "adam", "qadam, compatible": "adam"}
"""What a way is compared with, where that is not all-reduce."""
ROOM = {"low_precision_decentralized": 2.0, "async": 2.0}
"""Per cent that accuracy may fall by; else 1."""

Optimizer = Callable[[Any], torch.optim.Optimizer]
Figures = dict[str, Any]


class Way:
    """How the replicas of a model are kept together, by its name on the command line."""

    NAMES = (
        "all_reduce",
        "bf16",
        "fp16",
        "bytegrad",
        "bytegrad, error feedback",
        "bytegrad, as Bagua",
        "powersgd",
        "powersgd, rank 4",
        "decentralized",
        "shift_one",
        "low_precision_decentralized",
        "async",
        "adam",
        "qadam",
        "qadam, compatible",
    )

    def __init__(self, name: str, steps: int, rate: float) -> None:
        self.name = name
        self._steps = steps
        self._rate = rate

    def begin(
        self, model: nn.Module, usual: Optimizer
    ) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        """The wrapped model, and its optimizer: ``usual`` unless the way has one of its own."""
        make = usual
        if "adam" in self.name:
            share = 2.0 if self.name == "adam" else WARM_UP_SHARE
            make = partial(
                QAdamOptimizer,
                lr=1e-3 * self._rate,
                warmup_steps=max(1, int(share * self._steps)),
                compatible=self.name.endswith("compatible"),
            )
        optimizer = make(model.parameters())
        wrapped = DistributedDataParallel(model, algorithm=self._algorithm(optimizer))
        if self.name in ("bf16", "fp16"):
            assert wrapped.reconfigure(Configuration(wire_precision=self.name))
        return wrapped, optimizer

    def _algorithm(self, optimizer: torch.optim.Optimizer) -> Algorithm:
        if isinstance(optimizer, QAdamOptimizer):
            return QAdamAlgorithm(optimizer)
        name, arguments = self.name, dict[str, Any]()
        if name in ("all_reduce", "bf16", "fp16"):
            name = "gradient_allreduce"
        if name == "bytegrad, error feedback":
            name, arguments = "bytegrad", {"error_feedback": True}
        if name == "bytegrad, as Bagua":
            name, arguments = "bytegrad", {"range_elements": None}
        if name.startswith("powersgd"):
            rank = 4 if name.endswith("4") else 1
            first = self._steps // 10  # Torch's advice.
            arguments = {"matrix_approximation_rank": rank, "start_powerSGD_iter": first}
            name = "powersgd"
        if name == "shift_one":
            name, arguments = "decentralized", {"peer_selection_mode": "shift_one"}
        if name == "async":
            arguments = {"sync_interval_ms": ASYNC_INTERVAL_MS, "warmup_steps": self._steps // 10}
        return Algorithm.init(name, **arguments)

    def end(self, wrapped: DistributedDataParallel) -> None:
        """Replicas that train apart are averaged, as who evaluates them would."""
        if isinstance(wrapped.algorithm, AsyncModelAverageAlgorithm):
            wrapped.algorithm.abort(wrapped, average=True)
        elif self.name in ("decentralized", "shift_one", "low_precision_decentralized"):
            with torch.no_grad():
                for parameter in wrapped.module.parameters():
                    dist.all_reduce(parameter)
                    parameter.div_(dist.get_world_size())


def of_ranks(values: list[float], device: str) -> list[float]:
    """The means over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def train_digits(seed: int, way: Way, options: argparse.Namespace, device: str) -> Figures:
    """A residual network on scanned digits."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = (tensor.to(device) for tensor in digits())
    usual = partial(torch.optim.SGD, lr=0.05 * options.rate, momentum=0.9, weight_decay=1e-4)
    model, optimizer = way.begin(resnet18().to(device), usual)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for _ in range(options.steps):
        chosen = torch.randint(len(labels), (16,), generator=generator).to(device)
        loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    way.end(model)
    model.eval()
    with torch.no_grad():
        right = (model.module(test_images).argmax(1) == test_labels).double().mean()
    return _figures(losses, float(right), device)


def train_characters(seed: int, way: Way, options: argparse.Namespace, device: str) -> Figures:
    """A transformer on the text of Python's own help."""
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    number_of = {character: number for number, character in enumerate(alphabet)}
    text = torch.tensor([number_of[character] for character in corpus[:250_000]])
    text, later = text[:200_000], text[200_000:].unfold(0, CONTEXT + 1, 250).to(device)
    torch.manual_seed(seed)
    usual = partial(torch.optim.AdamW, lr=1e-3 * options.rate)
    model, optimizer = way.begin(CharacterModel(len(alphabet)).to(device), usual)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (8, 1), generator=generator)
        sequences: Tensor = text[starts + torch.arange(CONTEXT + 1)].to(device)
        logits = model(sequences[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits, sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    way.end(model)
    model.eval()
    with torch.no_grad():
        right = (model.module(later[:, :-1]).argmax(2) == later[:, 1:]).double().mean()
    return _figures(losses, float(right), device)


def _figures(losses: list[float], right: float, device: str) -> Figures:
    curve = of_ranks(losses, device)
    return {
        "loss": fmean(curve[-LAST_STEPS:]),
        "accuracy, %": 100 * of_ranks([right], device)[0],
        "curve": curve,
    }


TRAININGS: dict[str, Callable[[int, Way, argparse.Namespace, str], Figures]] = {
    "digits": train_digits,
    "characters": train_characters,
}
Found = dict[str, dict[str, list[Figures]]]
"""By training, by way: of each seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainings", nargs="+", choices=[*TRAININGS], default=[*TRAININGS])
    parser.add_argument("--ways", nargs="+", choices=Way.NAMES, default=[*Way.NAMES])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.0,
                        help="factor for the learning rates of SGD and AdamW")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: each rank has its own GPU and uses NCCL")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    found = train(options)
    if dist.get_rank() == 0:
        report(found)
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> Found:
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    found: Found = {}
    for name in options.trainings:
        found[name] = {way: [] for way in options.ways}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for way, figures in found[name].items():  # in turn
                each = Way(way, options.steps, options.rate)
                figures.append(TRAININGS[name](seed, each, options, device))
            if options.json and dist.get_rank() == 0:
                write_json(options.json, found)  # After each seed: the whole takes an hour.
    return found


def report(found: Found) -> None:
    rows = []
    for name, by_way in found.items():
        for way, seeds in by_way.items():
            row = [name, way]
            for figure in ("loss", "accuracy, %"):
                values = [seed[figure] for seed in seeds]
                row.append(f"{fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})")
            rows.append([*row, *_verdict(way, by_way)])
    header = ["training", "way", "loss: mean (range)", "accuracy, %", "beside", "points", "met"]
    print_table(header, rows)


def _verdict(way: str, by_way: dict[str, list[Figures]]) -> list[str]:
    """What it is compared with, by how many points its accuracy is off, and whether it may."""
    other = BESIDE.get(way, "all_reduce")
    if other not in by_way or way in (other, "adam"):
        return ["", "", ""]
    ours, theirs = (fmean(seed["accuracy, %"] for seed in by_way[it]) for it in (way, other))
    is_met = ours >= theirs - ROOM.get(way, 1.0)
    return [other, f"{ours - theirs:+.2f}", "yes" if is_met else "no"]


if __name__ == "__main__":
    main()
