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
from bagua_client.communication.compressed_exchange import CompressedSum
from bagua_client.communication.operations import Operation
from bagua_client.compression import DTYPES, RANGE_ELEMENTS, check_range
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket


@register("bytegrad", "gradients are averaged in 8 bits")
class ByteGradAlgorithm(Algorithm):
    """Bagua's ByteGrad: a quarter of the bytes (see :mod:`bagua_client.compression`).

    Each rank sends one chunk of a bucket to each other rank, in eight bits. A rank sums up the
    chunks that it receives in float32, divides by the number of ranks, and sends the result to all
    ranks in eight bits. Afterwards all ranks have the same bits. In a hierarchical reduction only
    what crosses nodes is compressed.

    Args:
        hierarchical: begin with reducing inside nodes first.
        average: over the ranks; else gradients are summed.
        error_feedback: a rank adds its rounding error to the gradients of the next step
            (Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019); costs 4 bytes a
            parameter.
        range_elements: how many numbers of a chunk share a minimum and a maximum; None: all of
            them, as in Bagua. Then large gradients of one layer round small ones of others to 0.

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
        own = {"lost": self._lost.state(self.names)} if self.error_feedback else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._lost.load(state.get("lost", {}), self.names)

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        divisor = 1.0 / self.scale(communicator.world_size)
        return CompressedSum(groups, divisor, self.range_elements, self._beside).operations
