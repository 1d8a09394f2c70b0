"""How many bytes a step would send if its numbers travelled in fewer bits, or as rank-1 matrices.

For ``bagua-autotune check``. What changes the numbers is tuned only where the user lists it; this
says what it could be worth before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bagua_client.algorithms.quantized import RANGE_ELEMENTS
from bagua_client.compression import BOUNDS_BYTES
from bagua_client.layout import TensorSpec

WORTH = 2
"""Torch's PowerSGD hook sends a matrix as it is unless that many times fewer numbers would do."""
FLOATS = ("float64", "float32", "float16", "bfloat16")


class Sent(NamedTuple):
    """Numbers of one dtype that are communicated together in each step.

    Attributes:
        shape: their sizes; of numbers that have none, how many there are.
        element_bytes: of one.
        is_float: else they always travel as they are.
        is_reduced: they are gradients; else weights that are gathered, whose precision is the
            training's own.
    """

    shape: tuple[int, ...]
    element_bytes: float
    is_float: bool = True
    is_reduced: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        return self.elements * self.element_bytes


def gradients(tensors: Sequence[TensorSpec]) -> list[Sent]:
    """What a step reduces."""
    return [
        Sent(each.shape, each.element_bytes, each.dtype.removeprefix("torch.") in FLOATS)
        for each in tensors
        if not each.is_sparse
    ]


def gathered(tensors: Sequence[TensorSpec], gathers: Sequence[tuple[int, int]]) -> list[Sent]:
    """What a step of a sharded model gathers.

    Args:
        tensors: of its units.
        gathers: for each, the unit's place among ``tensors``, and how many bytes there were.
    """
    found = []
    for place, size_bytes in gathers:
        elements = tensors[place].elements
        found.append(Sent((elements,), size_bytes / max(elements, 1), is_reduced=False))
    return found


def shares(sent: Sequence[Sent], has_shapes: bool) -> dict[str, float]:
    """Return what part of a step's bytes would be left: with ``bits16``, ``bits8`` and
    ``powersgd`` of rank 1 (Vogels et al., NeurIPS 2019); without those that would leave all.

    Args:
        has_shapes: the shapes are those of the weights. PowerSGD needs them, and replicas.
    """
    ways: dict[str, Callable[[Sent], float]] = {"bits16": _bits16, "bits8": _bits8}
    if has_shapes:
        ways["powersgd"] = _powersgd
    total = sum(each.bytes for each in sent)
    found = {way: sum(map(left, sent)) / total for way, left in ways.items()} if total else {}
    return {way: share for way, share in found.items() if share < 1}


def _bits16(sent: Sent) -> float:
    narrows = sent.is_float and sent.is_reduced
    return min(sent.bytes, 2.0 * sent.elements) if narrows else sent.bytes


def _bits8(sent: Sent) -> float:
    bounds = BOUNDS_BYTES * math.ceil(sent.elements / RANGE_ELEMENTS)
    return min(sent.bytes, sent.elements + bounds) if sent.is_float else sent.bytes


def _powersgd(sent: Sent) -> float:
    rows = sent.shape[0] if len(sent.shape) > 1 else 1
    columns = sent.elements // max(rows, 1)
    is_worth_it = len(sent.shape) > 1 and (rows + columns) * WORTH < sent.elements
    if not (sent.is_float and is_worth_it):
        return sent.bytes
    return (rows + columns) * sent.element_bytes
