"""A small model, and a loss that each rank has of its own in each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(6, 7, generator=generator)).square().mean()


def summed_gradients(
    model: nn.Module,
    rank: int,
    step: int,
    passes: int,
    loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
) -> list[torch.Tensor]:
    """Those of a rank over the passes of a step, by weight."""
    weights = list(model.parameters())
    sums = [torch.zeros_like(weight) for weight in weights]
    for at in range(passes):
        gradients = torch.autograd.grad(loss(model, rank, passes * step + at), weights)
        for total, each in zip(sums, gradients, strict=True):
            total += each
    return sums


class SeesBuckets:
    """An algorithm that notes which weights each bucket of a step holds, in their order."""

    buckets: list[list[int]]

    def reify(self, communicator: Any) -> Any:
        return self

    def departs(self, bucket: Any, wire: torch.Tensor) -> None:
        self.buckets.append([id(parameter) for parameter in bucket.parameters()])
        super().departs(bucket, wire)  # type: ignore[misc]


class MatrixModel(nn.Module):
    """Matrices of one shape, of others and with four dimensions, which become ready in another
    order than they are listed in, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(17, 5)
        self.inner = nn.ModuleList(nn.Linear(36, 36) for _ in range(3))
        self.narrow = nn.Linear(36, 17, bias=False)
        self.convolution = nn.Conv2d(3, 9, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.LayerNorm(36)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.convolution(images).flatten(1)
        for layer in self.inner:
            found = self.norm(layer(found).tanh())
        wanted: torch.Tensor = self.last(self.narrow(found).tanh())
        return wanted


class TypedModel(MatrixModel):
    """Of another type of numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.to(dtype)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.to(self.norm.weight.dtype)).float()


def image_loss(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return model(images).square().mean()
