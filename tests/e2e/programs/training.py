"""What the ranks of an end-to-end test do: train a tuned model and a stock twin side by side."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.agent import job

STEP_SECONDS = 0.01
DEFAULT = Configuration(first_bucket_bytes=1024**2)
"""What torch cuts where nobody says a size."""


@dataclass(frozen=True)
class Report:
    """What became of a training on one rank.

    Attributes:
        steps: how many it made.
        difference: the largest between a weight of the tuned model and the stock twin's.
        configurations: in force after each step, or from the next one on.
        tuned: whether the tuning came to its end.
        logged: the client's log lines, with their levels.
        threads: names of the client's threads at the end.
        groups: how many process groups there are at the end.
    """

    steps: int
    difference: float
    configurations: list[Configuration]
    tuned: bool
    logged: list[str]
    threads: list[str]
    groups: int


def make_model() -> nn.Module:
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(128, 128), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(128, 4))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 128, generator=generator), torch.randn(8, 4, generator=generator)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def train(
    most_steps: int,
    until_tuned: bool = True,
    steps_file: str | None = None,
    dissenting_rank: int = -1,
) -> Report:
    """Train for ``most_steps``, or until the tuning has ended and ten steps more.

    Args:
        steps_file: rank 0 writes the number of each step there.
        dissenting_rank: a rank that reads the third command of the service wrongly.
    """
    handler = Lines()
    logger = logging.getLogger("bagua_client")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if dist.get_rank() == dissenting_rank:
        _misread_the_third_command()
    plain = make_model()
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    tuned = DistributedDataParallel(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (tuned, twin)]
    configurations: list[Configuration] = []
    steps_left = most_steps
    while steps_left > 0:
        step = len(configurations)
        inputs, targets = batch(step, dist.get_rank())
        for model, optimizer in zip((tuned, twin), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        time.sleep(STEP_SECONDS)
        configurations.append(tuned.configuration)
        if steps_file is not None and dist.get_rank() == 0:
            # Whoever reads it meanwhile finds the number before.
            Path(f"{steps_file}.new").write_text(str(step + 1))
            Path(f"{steps_file}.new").replace(steps_file)
        steps_left -= 1
        if until_tuned and not tuned.is_tuning:
            steps_left, until_tuned = min(steps_left, 10), False
    pairs = zip(plain.parameters(), twin.module.parameters(), strict=True)
    logger.removeHandler(handler)
    return Report(
        steps=len(configurations),
        difference=max((ours - theirs).abs().max().item() for ours, theirs in pairs),
        configurations=configurations,
        tuned=not tuned.is_tuning,
        logged=handler.lines,
        threads=[t.name for t in threading.enumerate() if t.name.startswith("bagua-")],
        groups=len(dist.distributed_c10d._world.pg_map),
    )


def train_two(
    pause_seconds: float = 0.0, slow_seconds: float = 0.0
) -> list[tuple[bool, bool, bool]]:
    """Train two wrapped models in turns until both are tuned. For each step whether the first
    and the second are being tuned, and whether the second is at its default configuration.

    ``slow_seconds`` is what rank 1 computes longer for each model.
    """
    models = [DistributedDataParallel(make_model()) for _ in range(2)]
    seen = []
    for step in range(4000):
        inputs, targets = batch(step, dist.get_rank())
        for model in models:
            time.sleep(slow_seconds * (dist.get_rank() == 1))
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
        time.sleep(pause_seconds)
        first, second = (model.is_tuning for model in models)
        seen.append((first, second, models[1].configuration == DEFAULT))
        if not first and not second:
            break
    return seen


def _misread_the_third_command() -> None:
    seen = []

    class Misread(Configuration):
        @classmethod
        def from_json(cls, values: Mapping[str, Any]) -> Configuration:
            seen.append(values)
            right = Configuration.from_json(values)
            return Configuration(12345) if len(seen) == 3 else right

    # Of commands only: what all ranks are told of a result has configurations in it, too.
    job.Configuration = Misread  # type: ignore[misc]
