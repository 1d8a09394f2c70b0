"""Trains the same model twice, once under torch's DistributedDataParallel, and compares."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel

# Rounding of a sum of a few numbers in another order, with room for what follows from it.
RELATIVE = {torch.bfloat16: 2**-6, torch.float32: 1e-4, torch.float64: 1e-10}


def pair(model: torch.nn.Module, **options: Any) -> tuple[Stock, DistributedDataParallel]:
    """``model`` under torch's wrapper, and a copy of it under ours, with the same options."""
    twin = copy.deepcopy(model)
    options = {"gradient_as_bucket_view": True, **options}
    return Stock(model, **options), DistributedDataParallel(twin, **options)


def difference(stock: Stock, ours: DistributedDataParallel, at: str = "") -> str | None:
    """The first gradient or weight that differs by more than rounding; None if none does."""
    where = f"{at} " if at else ""
    names = [name for name, _ in stock.module.named_parameters()]
    for name, expected, actual in zip(
        names, stock.module.parameters(), ours.module.parameters(), strict=True
    ):
        for what, left, right in (
            ("weight", expected.detach(), actual.detach()),
            ("gradient", expected.grad, actual.grad),
        ):
            if (left is None) != (right is None):
                return f"{where}{what} of {name}: {left} under torch, {right} under ours"
            if left is not None and right is not None and not _close(left, right):
                values = f"{left.flatten()} under torch, {right.flatten()} under ours"
                return f"{where}{what} of {name}: {values}"
    return None


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    # Relative to the tensor's largest value: a sum that cancels is small, its rounding is not.
    scale = float(left.abs().max()) if left.numel() else 0.0
    relative = RELATIVE[left.dtype]
    return torch.allclose(right, left, rtol=relative, atol=relative * max(scale, 1e-3))
