"""A job whose network becomes slower while it runs: a backward pass that takes its time, and a
link between the ranks that takes time for each bucket and each byte, one bucket after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import GradientAllReduceAlgorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation

LAYERS, WIDTH = 6, 128
LAYER_SECONDS = 0.006
"""Of the backward pass of a layer, whose gradient has 64 KiB; long enough for busy cores."""
FAST_SECONDS_PER_BYTE = 1e-10
LAYER_BYTES = WIDTH * WIDTH * 4
SECONDS_PER_BUCKET = 0.0003


@dataclass
class Link:
    """Carries one bucket at a time, whatever its channel."""

    seconds_per_byte: float = FAST_SECONDS_PER_BYTE
    seconds_per_bucket: float = SECONDS_PER_BUCKET
    busy: threading.Lock = field(default_factory=threading.Lock)

    def start(self, flat: Tensor) -> None:
        """Be an operation of a bucket's chain; runs in a thread that relays buckets."""
        with self.busy:
            time.sleep(self.seconds_per_bucket + self.seconds_per_byte * flat.nbytes)


class OverLink(GradientAllReduceAlgorithm):
    """Gradients averaged as always, and then held up by the link."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.is_torchs = False
        self._link = link

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        return [*super().operations(communicator, configuration, channel), self._link]


class _Sleep(torch.autograd.Function):
    """The identity, with a backward pass that takes so long."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(LAYER_SECONDS)
        return gradient


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.linear(_Sleep.apply(values)).tanh()
        return result


@dataclass
class Course:
    """What became of the job on one rank, by step.

    Attributes:
        tuning: whether it was being tuned.
        configurations: in force after the step, or from the next one on.
        seconds: the step took.
        slowed_at: the first step on the slow network.
    """

    tuning: list[bool] = field(default_factory=list)
    configurations: list[Configuration] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    slowed_at: int = 0


class _Job:
    """The model on its link, and what became of it."""

    def __init__(self, seconds_per_byte: float) -> None:
        self.link = Link(seconds_per_byte)
        torch.manual_seed(7)
        self._model = DistributedDataParallel(
            nn.Sequential(*(_Layer() for _ in range(LAYERS))),
            algorithm=OverLink(self.link),
        )
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._inputs = torch.randn(4, WIDTH, requires_grad=True)
        self.course = Course()

    def train(self, steps: int, until_tuning_is: bool | None = None) -> None:
        for _ in range(steps):
            began = time.perf_counter()
            self._optimizer.zero_grad()
            self._model(self._inputs * (dist.get_rank() + 1)).square().mean().backward()
            self._optimizer.step()
            self.course.seconds.append(time.perf_counter() - began)
            self.course.tuning.append(self._model.is_tuning)
            self.course.configurations.append(self._model.configuration)
            if self._model.is_tuning is until_tuning_is:
                return


def train_while_the_network_changes(
    quiet_steps: int = 150, most_steps: int = 3000, last_steps: int = 20
) -> Course:
    """Train until the job is tuned, ``quiet_steps`` more, and then on a slow network until it is
    tuned again, or for ``most_steps`` in each of the three.

    A busy machine may change, too, and be tuned for: then the quiet steps begin anew.
    """
    job = _Job(FAST_SECONDS_PER_BYTE)
    job.train(most_steps, until_tuning_is=False)
    while any(job.course.tuning[-quiet_steps:]) and len(job.course.tuning) < most_steps:
        job.train(1)
    # Then a layer's gradient travels as long as its backward pass takes: much to hide, or not.
    job.link.seconds_per_byte = LAYER_SECONDS / LAYER_BYTES
    job.course.slowed_at = len(job.course.tuning)
    job.train(most_steps, until_tuning_is=True)
    job.train(most_steps, until_tuning_is=False)
    job.train(last_steps)
    return job.course


def train_on_a_slow_network(most_steps: int = 3000, last_steps: int = 20) -> Course:
    """Train until the job is tuned, or for ``most_steps``, and a little more."""
    job = _Job(LAYER_SECONDS / LAYER_BYTES)
    job.train(most_steps, until_tuning_is=False)
    job.train(last_steps)
    return job.course
