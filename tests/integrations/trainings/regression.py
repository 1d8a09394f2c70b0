"""A model of some kilobytes, and data of which each rank gets its own part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8
TARGETS = 3


def model() -> nn.Sequential:
    """With a layer whose buffers travel as well."""
    return nn.Sequential(
        nn.Linear(WIDTH, 24),
        nn.BatchNorm1d(24),
        nn.Tanh(),
        nn.Linear(24, 24),
        nn.Linear(24, TARGETS),
    )


def data(rows: int, shuffle: bool = True) -> DataLoader[Any]:
    """Batches of 4; a framework hands each rank its share of them."""
    inputs = torch.randn(rows, WIDTH)
    dataset = TensorDataset(inputs, inputs[:, :TARGETS] * 2)
    return DataLoader(dataset, batch_size=4, shuffle=shuffle)
