"""Gradients averaged over all ranks in every step: DistributedDataParallel's own algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_client.algorithms.base import Algorithm, register
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation
from bagua_client.configuration import Configuration


@register("gradient_allreduce")
class GradientAllReduce(Algorithm):
    """Synchronous data parallelism (Li et al., PyTorch Distributed, VLDB 2020)."""

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        return communicator.sum_operations(configuration, channel)
