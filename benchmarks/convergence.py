"""Convergence under each algorithm and with 16 bits on the wire, compared with plain averaging.

The examples' trainings run with each of them, several seeds each.

    torchrun --nproc-per-node 4 benchmarks/convergence.py --json all.json
    torchrun --nproc-per-node 2 benchmarks/convergence.py --ways all_reduce bf16 fp16
    torchrun --nproc-per-node 2 benchmarks/convergence.py --device cuda --steps 500 --seeds 5
    python benchmarks/convergence.py --network 100mbit --trainings characters --plot build/curves

"loss" is that of the last steps' batches, "accuracy" that on images, or text, that were not trained
on, with replicas that trained apart averaged first; means over all ranks. qadam is an optimizer of
its own, so it stands beside "adam": the same, whose warm-up never ends. With a network the ranks
are on emulated hosts, two on each. "To the first one's loss" is how long it takes to the loss that
the first way ends with, and 2 % more.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_client import Configuration, DistributedDataParallel, tune
from bagua_client.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    QuantizedAlgorithm,
)
from benchmarks.support.curves import came_to, draw
from benchmarks.support.harness import print_table, write_json
from benchmarks.testbed import Network, Testbed
from examples.characters import CONTEXT, CharacterModel, topics
from examples.digits import digits, resnet18

WARM_UP_SHARE = 0.25
"""Of qadam's steps."""
ASYNC_INTERVAL_MS = 100
LAST_STEPS = 20
AS_LOW = 1.02
TIMEOUT_SECONDS = 6 * 3600.0
HOSTS, RANKS_OF_A_HOST = 2, 2
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
    OF_SHARDS = (
        "all_reduce",
        "bf16",
        "quantized",
        "quantized, error feedback",
        "quantized_weights",
        "quantized_gradients",
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

    def begin_sharded(self, model: Any, usual: Optimizer) -> tuple[Any, torch.optim.Optimizer]:
        """The model, sharded, with a unit for each of its blocks; and its optimizer."""
        for block in model.blocks:
            fully_shard(block)
        tuned: Any = tune(fully_shard(model), algorithm=self._of_shards())
        return tuned, usual(tuned.parameters())

    def _of_shards(self) -> str | Algorithm:
        if self.name == "quantized, error feedback":
            return QuantizedAlgorithm(error_feedback=True)
        return "gradient_allreduce" if self.name in ("all_reduce", "bf16") else self.name

    def go_on(self, wrapped: Any) -> None:
        """The first step of a sharded model is made: from now on its settings can change."""
        if self.name == "bf16":
            changed = replace(wrapped.configuration, wire_precision="bf16")
            assert wrapped.reconfigure(changed)

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
    losses, marks = [], [time.perf_counter()]
    for _ in range(options.steps):
        chosen = torch.randint(len(labels), (16,), generator=generator).to(device)
        loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        marks.append(time.perf_counter())
    way.end(model)
    model.eval()
    with torch.no_grad():
        right = (model.module(test_images).argmax(1) == test_labels).double().mean()
    return _figures(losses, marks, float(right), device)


def train_characters(
    seed: int, way: Way, options: argparse.Namespace, device: str, is_sharded: bool = False
) -> Figures:
    """A transformer on the text of Python's own help."""
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    number_of = {character: number for number, character in enumerate(alphabet)}
    text = torch.tensor([number_of[character] for character in corpus[:250_000]])
    text, later = text[:200_000], text[200_000:].unfold(0, CONTEXT + 1, 250).to(device)
    torch.manual_seed(seed)
    usual = partial(torch.optim.AdamW, lr=1e-3 * options.rate)
    model: Any = CharacterModel(len(alphabet)).to(device)
    model, optimizer = (way.begin_sharded if is_sharded else way.begin)(model, usual)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses, marks = list[float](), [time.perf_counter()]
    for _ in range(options.steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (8, 1), generator=generator)
        sequences: Tensor = text[starts + torch.arange(CONTEXT + 1)].to(device)
        logits = model(sequences[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits, sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if is_sharded and not losses:
            way.go_on(model)
        losses.append(loss.item())
        marks.append(time.perf_counter())
    if not is_sharded:
        way.end(model)
    model.eval()
    with torch.no_grad():
        right = (
            ((model if is_sharded else model.module)(later[:, :-1]).argmax(2) == later[:, 1:])
            .double()
            .mean()
        )
    return _figures(losses, marks, float(right), device)


def _figures(losses: list[float], marks: list[float], right: float, device: str) -> Figures:
    curve = of_ranks(losses, device)
    return {
        "loss": fmean(curve[-LAST_STEPS:]),
        "accuracy, %": 100 * of_ranks([right], device)[0],
        "curve": curve,
        "seconds": [after - before for before, after in pairwise(marks)],
    }


TRAININGS: dict[str, Callable[[int, Way, argparse.Namespace, str], Figures]] = {
    "digits": train_digits,
    "characters": train_characters,
    "characters, sharded": partial(train_characters, is_sharded=True),
}
Found = dict[str, dict[str, list[Figures]]]
"""By training, by way: of each seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainings", nargs="+", choices=[*TRAININGS], default=[*TRAININGS])
    parser.add_argument("--ways", nargs="+", choices={*Way.NAMES, *Way.OF_SHARDS})
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.0,
                        help="factor for the learning rates of SGD and AdamW")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: each rank has its own GPU and uses NCCL")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the losses there")
    parser.add_argument("--network", help="of emulated hosts, such as 100mbit; without torchrun")
    options = parser.parse_args()
    if options.network and "RANK" not in os.environ:
        sys.exit(on_hosts(options.network))
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    found = train(options)
    if dist.get_rank() == 0:
        report(found)
        for name, by_way in found.items() if options.plot else ():
            file = options.plot / f"convergence-{name.replace(', ', '-')}.png"
            draw(file, by_way, ", ".join(filter(None, [name, options.network])))
    dist.destroy_process_group()


def on_hosts(network: str) -> int:
    """Run this program on emulated hosts; its exit code."""
    with Testbed(Network.parse(network), HOSTS, RANKS_OF_A_HOST, ordinary_priority=True) as testbed:
        if testbed.fallback:
            print(f"over loopback: {testbed.fallback}", flush=True)
        return testbed.start([__file__, *sys.argv[1:]]).wait(TIMEOUT_SECONDS)


def train(options: argparse.Namespace) -> Found:
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    found: Found = {}
    for name in options.trainings:
        possible = Way.OF_SHARDS if name.endswith("sharded") else Way.NAMES
        found[name] = {way: [] for way in options.ways or possible if way in possible}
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
            reached = came_to(seeds, AS_LOW * fmean(s["loss"] for s in next(iter(by_way.values()))))
            row.append("never" if reached is None else "{} steps, {:.0f} s".format(*reached))
            rows.append([*row, *_verdict(way, by_way)])
    header = ["training", "way", "loss: mean (range)", "accuracy, %", "to the first one's loss"]
    header += ["beside", "points", "met"]
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
