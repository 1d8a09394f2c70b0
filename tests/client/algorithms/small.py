"""A small model, and a loss that each rank has of its own in each step."""

from __future__ import annotations

import torch
from torch import nn


def small_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return model(torch.randn(6, 7, generator=generator)).square().mean()
