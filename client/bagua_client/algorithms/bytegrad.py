"""Gradients averaged in eight bits: each rank sums up one chunk of a bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms.base import Algorithm, register
from bagua_client.algorithms.companion import Companion, in_bucket
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.compressed import CompressedSum
from bagua_client.communication.operations import Operation
from bagua_client.compression import DTYPES, RANGE_ELEMENTS, check_range
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket


@register("bytegrad", "gradients are averaged in 8 bits")
class ByteGradAlgorithm(Algorithm):
    """Bagua's ByteGrad: a quarter of the bytes (see :mod:`bagua_client.compression`).

    Ranks send each other the chunks of a bucket in eight bits; each sums up its own in float32,
    divides by the number of ranks, and sends it to all in eight bits again. All ranks have the same
    bits afterwards. Inside nodes that reduce first, gradients travel as they are.

    Args:
        hierarchical: begin with reducing inside nodes first.
        average: over the ranks; else gradients are summed.
        error_feedback: what a rank has lost in rounding it adds in the next step (Karimireddy et
            al., Error Feedback Fixes SignSGD, ICML 2019); costs 4 bytes a parameter.
        range_elements: how many numbers of a chunk share a minimum and a maximum; None: all, as in
            Bagua, where the large gradients of one layer let the small ones of others become 0.

    Raises:
        ValueError: ``range_elements`` is not a power of two from 1024 on.
    """

    exchanges = 2
    scales_itself = True

    def __init__(
        self,
        hierarchical: bool = True,
        average: bool = True,
        error_feedback: bool = False,
        range_elements: int | None = RANGE_ELEMENTS,
    ) -> None:
        check_range(range_elements)
        self.hierarchical = hierarchical
        self.average = average
        self.error_feedback = error_feedback
        self.range_elements = range_elements
        self._lost = Companion()
        self._beside: tuple[torch.Tensor, torch.Tensor] | None = None

    def reify(self, communicator: Communicator) -> ByteGradAlgorithm:
        return ByteGradAlgorithm(
            self.hierarchical, self.average, self.error_feedback, self.range_elements
        )

    def scale(self, world_size: int) -> float:
        return 1.0 / world_size if self.average else 1.0

    def multiple(self, communicator: Communicator, configuration: Configuration) -> int:
        # As many as Bagua fills a bucket up to, and a chunk for each rank that there is one for.
        return math.lcm(communicator.world_size, communicator.ranks_across(configuration))

    def carries(self, flat: torch.Tensor) -> bool:
        return flat.dtype in DTYPES

    def departs(self, bucket: GradBucket, wire: torch.Tensor) -> None:
        if self.error_feedback:
            lost = self._lost.beside(bucket.parameters(), wire, in_bucket(bucket))
            self._beside = wire, lost

    def state_dict(self) -> dict[str, Any]:
        return {"lost": self._lost.state(self.names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._lost.load(state["lost"], self.names)

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        divisor = 1.0 / self.scale(communicator.world_size)
        return CompressedSum(groups, divisor, self.range_elements, self._beside).operations
