"""Sends flat tensors over the channels; a large tensor is split into parts that travel at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import AllReduce
from bagua_client.communication.pipeline import Arrival, Pipeline, pipeline_for
from bagua_client.configuration import Configuration

SMALLEST_PART_BYTES = 512 * 1024
"""The smallest part that a tensor is split into: each part adds the latency of a message."""
ALIGNED_ELEMENTS = 16
"""Number of elements at whose multiples each part begins: NCCL copies 16 bytes at a time."""


class Carrier:
    """Runs one algorithm's chains of operations. All ranks must pass tensors in the same order."""

    def __init__(self, algorithm: Algorithm, communicator: Communicator) -> None:
        self._algorithm = algorithm
        self._communicator = communicator
        self._turn = 0
        # One pipeline for each channel: a chain never waits for a chain of another channel.
        self._pipelines: dict[tuple[torch.device, int], Pipeline] = {}

    def multiple(self, configuration: Configuration) -> int:
        """The number that must divide the element count of each tensor that travels."""
        return math.lcm(
            self._communicator.padding_multiple(configuration),
            self._algorithm.multiple(self._communicator, configuration),
        )

    def begin_step(self) -> None:
        """Begin a step: the next part travels on the first channel."""
        self._turn = 0

    def carry(
        self,
        flat: torch.Tensor,
        configuration: Configuration,
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        """Start the algorithm's chain on ``flat``: a small tensor whole, a large one in parts.

        Each part travels on the next channel. ``on_end`` is called when all parts have arrived.
        """
        arrivals = []
        parts = self._parts(flat, configuration)
        for part in parts:
            channel = self._turn % configuration.channels
            self._turn += 1
            chain = self._algorithm.operations(self._communicator, configuration, channel)
            pipeline = self._pipeline(flat.device, channel)
            arrivals.append(pipeline.start(part, chain, on_end if len(parts) == 1 else None))
        return arrivals[0] if len(parts) == 1 else pipeline.gather(flat, arrivals, on_end)

    def sum_up(self, flat: torch.Tensor, on_end: Callable[[], None] | None = None) -> Arrival:
        """All-reduce ``flat`` as a whole, whatever the configuration and the algorithm."""
        operations = (AllReduce(self._communicator.everyone),)
        return self._pipeline(flat.device, 0).start(flat, operations, on_end)

    def close(self) -> None:
        """Release threads and CUDA streams; the next chain that needs them makes new ones."""
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()

    def _parts(self, flat: torch.Tensor, configuration: Configuration) -> Sequence[torch.Tensor]:
        most = min(configuration.channels, flat.nbytes // SMALLEST_PART_BYTES)
        if most <= 1 or self._algorithm.travels_whole:
            return (flat,)
        unit = self.multiple(configuration) * ALIGNED_ELEMENTS
        return torch.split(flat, math.ceil(flat.numel() / most / unit) * unit)

    def _pipeline(self, device: torch.device, channel: int) -> Pipeline:
        key = device, channel
        if key not in self._pipelines:
            self._pipelines[key] = pipeline_for(device)
        return self._pipelines[key]
