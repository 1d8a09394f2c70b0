"""A model most of whose weights are matrices, and a loss that each rank has of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


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
