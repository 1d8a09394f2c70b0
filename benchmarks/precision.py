"""What 16 bits on the wire do to a training: the examples' trainings with each, some seeds each.

    torchrun --nproc-per-node 2 benchmarks/precision.py --json precision.json    # some 15 minutes
    torchrun --nproc-per-node 2 benchmarks/precision.py --device cuda --steps 500 --seeds 5

A precision is as good as float32 where its mean lies within the spread of float32's seeds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from harness import print_table, write_json
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bagua_client import Configuration, DistributedDataParallel
from examples.characters import CONTEXT, CharacterModel, topics
from examples.digits import digits, resnet18

PRECISIONS = ("as_is", "bf16", "fp16")
LAST_STEPS = 20
Figures = dict[str, float]


def under(model: torch.nn.Module, precision: str, device: str) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model.to(device))
    assert wrapped.reconfigure(Configuration(wire_precision=precision))
    return wrapped


def of_ranks(value: float, device: str) -> float:
    """The mean over all ranks."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train_digits(seed: int, precision: str, steps: int, device: str) -> Figures:
    """Loss of the last steps, and accuracy on images that were not trained on, in per cent."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = (tensor.to(device) for tensor in digits())
    model = under(resnet18(), precision, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(labels), (16,), generator=generator).to(device)
        loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = (model.module(test_images).argmax(1) == test_labels).double().mean()
    return {
        "loss": of_ranks(fmean(losses[-LAST_STEPS:]), device),
        "accuracy, %": 100 * of_ranks(float(right), device),
    }


def train_characters(seed: int, precision: str, steps: int, device: str) -> Figures:
    """Loss of the last steps, and the characters that were predicted right, in per cent."""
    corpus = "\n".join(topics.values())
    alphabet = sorted(set(corpus))
    text = torch.tensor([alphabet.index(character) for character in corpus[:200_000]])
    torch.manual_seed(seed)
    model = under(CharacterModel(len(alphabet)), precision, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses, rights = [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (8, 1), generator=generator)
        sequences: Tensor = text[starts + torch.arange(CONTEXT + 1)].to(device)
        logits = model(sequences[:, :-1]).flatten(0, 1)
        target = sequences[:, 1:].flatten()
        loss = functional.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        rights.append(float((logits.argmax(1) == target).double().mean()))
    return {
        "loss": of_ranks(fmean(losses[-LAST_STEPS:]), device),
        "accuracy, %": 100 * of_ranks(fmean(rights[-LAST_STEPS:]), device),
    }


TRAININGS: dict[str, Callable[[int, str, int, str], Figures]] = {
    "digits": train_digits,
    "characters": train_characters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trainings", nargs="+", choices=[*TRAININGS], default=[*TRAININGS])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: a GPU for each rank, and NCCL")  # fmt: skip
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    found = {
        name: {
            precision: [
                TRAININGS[name](seed, precision, options.steps, device)
                for seed in range(options.seeds)
            ]
            for precision in options.precisions
        }
        for name in options.trainings
    }
    if dist.get_rank() == 0:
        report(found)
        if options.json:
            write_json(options.json, found)
    dist.destroy_process_group()


def report(found: dict[str, dict[str, list[Figures]]]) -> None:
    rows = []
    for name, by_precision in found.items():
        for precision, seeds in by_precision.items():
            row = [name, precision]
            for figure in seeds[0]:
                values = [seed[figure] for seed in seeds]
                row.append(f"{fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})")
            rows.append(row)
    print_table(["training", "on the wire", "loss: mean (range)", "accuracy, %"], rows)


if __name__ == "__main__":
    main()
