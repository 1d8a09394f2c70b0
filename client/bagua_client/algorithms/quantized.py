"""Eight bits for each number that a sharded model's ranks exchange: its parameters, its gradients,
or both."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms.base import Algorithm, GlobalAlgorithmRegistry, register
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.link import Link
from bagua_client.compression import DTYPES, check_range, compress, decompress

RANGE_ELEMENTS = 1024
"""The bounds are then 0.8 % of what travels in place of numbers of 4 bytes; a large number makes no
more than so many others coarse."""


@register("quantized", "a sharded model's parameters and gradients travel in 8 bits")
class QuantizedAlgorithm(Algorithm):
    """Parameters are gathered, and gradients reduced, in eight bits: a quarter of the bytes of
    float32, half of those of bfloat16 (see :mod:`bagua_client.compression`). Both are what ZeRO++
    does (Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant Model
    Training, arXiv 2306.10209: qwZ, and qgZ with eight bits in place of four).

    Parameters: the forward and backward passes compute with what arrives, which is the same on all
    ranks, this rank's own part included. The optimizer's parameters stay exact.

    Gradients: each rank gets the others' parts of its own shard in eight bits, and adds them up in
    float32. So each gradient is rounded once, however many ranks there are.

    Where the ranks of a node gather and reduce among themselves first (``hierarchical``), only what
    crosses nodes travels in eight bits.

    Args:
        hierarchical: begin with gathering and reducing by node.
        weights, gradients: what travels in eight bits.
        error_feedback: a rank adds what rounding its gradients has lost to those of the next step
            (Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019). Costs 4 bytes for each
            parameter of the whole model on each rank; it begins anew, at zero, where other units
            communicate as one, and where a training is resumed.
        range_elements: how many numbers share a minimum and a maximum.

    Raises:
        ValueError: neither is to travel in eight bits, or there can be no ranges of this size.
    """

    models = ("sharded",)

    def __init__(
        self,
        hierarchical: bool = True,
        weights: bool = True,
        gradients: bool = True,
        error_feedback: bool = False,
        range_elements: int = RANGE_ELEMENTS,
    ) -> None:
        check_range(range_elements)
        if not weights and not gradients:
            raise ValueError("neither the weights nor the gradients are to travel in 8 bits")
        if not weights or not gradients:
            self.name = "quantized_weights" if weights else "quantized_gradients"
        self.hierarchical = hierarchical
        self.weights, self.gradients = weights, gradients
        self.error_feedback = error_feedback and gradients
        self.range_elements = range_elements
        # As they leave, and as they arrive.
        self.copied_bytes = 2 * weights, 2 * gradients
        self.kept_bytes = 4 if self.error_feedback else 0
        self._lost: dict[int, torch.Tensor] = {}

    def reify(self, communicator: Communicator) -> Algorithm:
        own = super().reify(communicator)
        assert isinstance(own, QuantizedAlgorithm)
        own._lost = {}
        return own

    def carries(self, flat: torch.Tensor) -> bool:
        return flat.dtype in DTYPES

    def gather(self, link: Link, part: torch.Tensor, by_rank: torch.Tensor) -> None:
        if not self.weights or not self.carries(part):
            super().gather(link, part, by_rank)
            return
        packed = compress(part[None], range_elements=self.range_elements)[0]
        received = packed.new_empty(link.ranks, packed.numel())
        link.all_gather(packed, received)
        decompress(received, by_rank, range_elements=self.range_elements)

    def reduce(
        self, link: Link, by_rank: torch.Tensor, part: torch.Tensor, op: Any, unit: int
    ) -> None:
        is_mean = op == dist.ReduceOp.AVG
        is_known = is_mean or op == dist.ReduceOp.SUM
        if not self.gradients or not self.carries(part) or not is_known:
            super().reduce(link, by_rank, part, op, unit)
            return
        lost = self._lost_of(unit, by_rank) if self.error_feedback else None
        if lost is not None:
            by_rank.add_(lost)
        packed = compress(by_rank, range_elements=self.range_elements)
        if lost is not None:
            kept = decompress(packed, torch.empty_like(by_rank), None, self.range_elements)
            # The step of infinite gradients is skipped, but they would stay here for ever.
            torch.sub(by_rank, kept, out=lost).nan_to_num_(0.0, 0.0, 0.0)
        received = link.all_to_all(packed)
        decompress(received, part, float(link.ranks) if is_mean else None, self.range_elements)

    def _lost_of(self, unit: int, by_rank: torch.Tensor) -> torch.Tensor:
        own = self._lost.get(unit)
        if own is None or own.shape != by_rank.shape:
            own = self._lost[unit] = torch.zeros_like(by_rank, dtype=torch.float32)
        return own


GlobalAlgorithmRegistry.register(
    "quantized_weights",
    partial(QuantizedAlgorithm, gradients=False),
    "a sharded model's parameters are gathered in 8 bits",
)
GlobalAlgorithmRegistry.register(
    "quantized_gradients",
    partial(QuantizedAlgorithm, weights=False),
    "a sharded model's gradients are reduced in 8 bits",
)
