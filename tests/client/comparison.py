"""Trains the same model twice, once under torch's DistributedDataParallel, and compares."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel

# Rounding of a sum of a few numbers in another order, with room for what follows from it.
RELATIVE = {torch.bfloat16: 2**-6, torch.float32: 1e-4, torch.float64: 1e-10}

CARRIED = 0.01


def pair(model: torch.nn.Module, **options: Any) -> tuple[Stock, DistributedDataParallel]:
    """``model`` under torch's wrapper, and a copy of it under ours, with the same options."""
    twin = copy.deepcopy(model)
    options = {"gradient_as_bucket_view": True, **options}
    return Stock(model, **options), DistributedDataParallel(twin, **options)


class Summands:
    """The largest that the ranks add up to each gradient, from one ``clear`` to the next, and at
    least a hundredth of the largest so far.

    What a sum is rounded by goes with its summands (Higham, "Accuracy and Stability of Numerical
    Algorithms", eq. 4.4), and the gradients of a tensor of two elements may cancel, all of them.
    The weights carry on what earlier sums were rounded by: the gradient of one that has come close
    to zero is small, the rounding of that weight is not.
    """

    def __init__(self, stock: Stock) -> None:
        self._parameters = list(stock.module.parameters())
        self._largest = torch.zeros(len(self._parameters))
        self._so_far = self._largest.clone()
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, at=index: self._add(at, gradient))

    def clear(self) -> None:
        self._largest.zero_()

    def largest(self) -> list[float]:
        """By parameter, of all ranks. Collective."""
        self._so_far = torch.maximum(self._so_far, self._largest)
        found = torch.maximum(self._largest, CARRIED * self._so_far)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.numel():
            largest = gradient.detach().abs().max().float()
            self._largest[index] = torch.maximum(self._largest[index], largest)


def difference(
    stock: Stock,
    ours: DistributedDataParallel,
    at: str = "",
    summands: Sequence[float] = (),
    rate: float = 0.0,
) -> str | None:
    """The first gradient or weight that differs by more than rounding; None if none does.

    Args:
        summands: by parameter the largest that was added up to its gradient, where known.
        rate: by which gradients move the weights.
    """
    where = f"{at} " if at else ""
    names = [name for name, _ in stock.module.named_parameters()]
    for name, expected, actual, summand in zip(
        names,
        stock.module.parameters(),
        ours.module.parameters(),
        summands or [0.0] * len(names),
        strict=True,
    ):
        for what, left, right, least in (
            ("weight", expected.detach(), actual.detach(), rate * summand),
            ("gradient", expected.grad, actual.grad, summand),
        ):
            if (left is None) != (right is None):
                return f"{where}{what} of {name}: {left} under torch, {right} under ours"
            if left is not None and right is not None and not _close(left, right, least):
                values = f"{left.flatten()} under torch, {right.flatten()} under ours"
                return f"{where}{what} of {name}: {values}"
    return None


def _close(left: torch.Tensor, right: torch.Tensor, least_scale: float) -> bool:
    # Relative to the tensor's largest value: a sum that cancels is small, its rounding is not.
    scale = max(float(left.abs().max()) if left.numel() else 0.0, least_scale)
    relative = RELATIVE[left.dtype]
    return torch.allclose(right, left, rtol=relative, atol=relative * max(scale, 1e-3))
