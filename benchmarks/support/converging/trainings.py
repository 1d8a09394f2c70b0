"""The trainings: of images of digits, and of texts that are on every machine with PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from benchmarks.support.converging.ways import Way
from examples.characters import CONTEXT, CharacterModel, topics
from examples.digits import digits, resnet18

LAST_STEPS = 20
CODE_BYTES, LATER_BYTES = 24 * 2**20, 2**20
Figures = dict[str, Any]


@dataclass(frozen=True)
class Text:
    """A text to learn, as numbers.

    Attributes:
        read: all of it, and the part of it that is not trained on.
        symbols: how many different numbers there are.
        context, batch: the length of a sequence, and the sequences of each rank in a step.
        rate: the usual learning rate.
        model: the sizes of the model.
        is_narrow: it is computed in bfloat16, on GPUs.
    """

    read: Callable[[], tuple[Tensor, Tensor]]
    symbols: int
    context: int = CONTEXT
    batch: int = 8
    rate: float = 1e-3
    model: Mapping[str, int] = field(default_factory=dict)
    is_narrow: bool = False


def _help() -> tuple[Tensor, Tensor]:
    """Python's own help, by characters."""
    corpus = "\n".join(topics.values())
    number_of = {character: number for number, character in enumerate(sorted(set(corpus)))}
    text = torch.tensor([number_of[character] for character in corpus[:250_000]])
    return text[:200_000], text[200_000:]


def _sources() -> tuple[Tensor, Tensor]:
    """PyTorch's own Python sources, by bytes."""
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    corpus = b"".join(file.read_bytes() for file in files)[: CODE_BYTES + LATER_BYTES]
    text = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    return text[:-LATER_BYTES], text[-LATER_BYTES:]


HELP = Text(_help, symbols=len(set("\n".join(topics.values()))))
# 100 million parameters.
SOURCES = Text(
    _sources,
    symbols=256,
    context=512,
    batch=8,
    rate=3e-4,
    model={"width": 768, "layers": 14, "heads": 12, "context": 512},
    is_narrow=True,
)


def of_ranks(values: list[float], device: str) -> list[float]:
    """The means over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def train_digits(seed: int, way: Way, device: str) -> Figures:
    """A residual network on scanned digits."""
    torch.manual_seed(seed)
    images, labels, test_images, test_labels = (tensor.to(device) for tensor in digits())
    usual = partial(torch.optim.SGD, lr=0.05 * way.rate, momentum=0.9, weight_decay=1e-4)
    model, optimizer = way.begin(resnet18().to(device), usual)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses, marks = list[float](), [time.perf_counter()]
    for _ in range(way.steps):
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


def train_text(
    seed: int, way: Way, device: str, text: Text = HELP, is_sharded: bool = False
) -> Figures:
    """A transformer that predicts a text's next character, or byte."""
    learned, later = text.read()
    later = later.unfold(0, text.context + 1, 250)[: 2**20 // text.context**2 * 4]
    later = later.long().to(device)
    torch.manual_seed(seed)
    usual = partial(torch.optim.AdamW, lr=text.rate * way.rate)
    model: Any = CharacterModel(text.symbols, **text.model).to(device)
    begin = partial(way.begin_sharded, is_narrow=text.is_narrow) if is_sharded else way.begin
    model, optimizer = begin(model, usual)
    narrow = torch.autocast(
        device.partition(":")[0], torch.bfloat16, enabled=text.is_narrow and not is_sharded
    )
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    losses, marks = list[float](), [time.perf_counter()]
    for _ in range(way.steps):
        most = len(learned) - text.context - 1
        starts = torch.randint(most, (text.batch, 1), generator=generator)
        sequences = learned[starts + torch.arange(text.context + 1)].long().to(device)
        with narrow:
            logits = model(sequences[:, :-1]).flatten(0, 1)
            loss = functional.cross_entropy(logits.float(), sequences[:, 1:].flatten())
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
    whole = model if is_sharded else model.module
    with torch.no_grad(), narrow:
        right = [
            (whole(part[:, :-1]).argmax(2) == part[:, 1:]).double().mean().item()
            for part in later.split(64)
        ]
    return _figures(losses, marks, fmean(right), device)


def _figures(losses: list[float], marks: list[float], right: float, device: str) -> Figures:
    curve = of_ranks(losses, device)
    return {
        "loss": fmean(curve[-LAST_STEPS:]),
        "accuracy, %": 100 * of_ranks([right], device)[0],
        "curve": curve,
        "seconds": [after - before for before, after in pairwise(marks)],
    }


TRAININGS: dict[str, Callable[[int, Way, str], Figures]] = {
    "digits": train_digits,
    "characters": train_text,
    "characters, sharded": partial(train_text, is_sharded=True),
    "sources": partial(train_text, text=SOURCES),
    "sources, sharded": partial(train_text, text=SOURCES, is_sharded=True),
}
