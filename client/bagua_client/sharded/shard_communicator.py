"""The process groups between the ranks that hold the parts of one sharded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration


class ShardCommunicator(Communicator):
    """Its channels are between the ranks that hold the parts of one copy of the model.

    On each channel there is a group to gather on, and one to reduce gradients on, if that has its
    own; the first to gather on is torch's.

    Args:
        group: of all ranks that train the model.
        shards: the ranks of ``group`` that hold its parts, for each copy of the model.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, shards: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(group, device)
        self._shards = shards
        self._flat_groups = [[]]

    def prepare(self, configuration: Configuration, exchanges: int = 1) -> None:
        """See :meth:`Communicator.prepare`."""
        self.check(configuration)
        self._failure = None
        while len(self._flat_groups) < configuration.channels:
            self._flat_groups.append([])
        for channel, groups in enumerate(self._flat_groups[: configuration.channels]):
            while len(groups) < _needed(configuration, channel):
                # As by node, where a channel has several groups: all kernels fit on the GPU.
                groups.append(self._channel_group(self._shards, by_node=True))
        if self._failure is not None:
            raise self._failure

    def _give_up(self, configuration: Configuration) -> list[dist.ProcessGroup]:
        unneeded = []
        for channel, groups in enumerate(self._flat_groups[: configuration.channels]):
            needed = _needed(configuration, channel)
            unneeded += groups[needed:]
            del groups[needed:]
        return unneeded + super()._give_up(configuration)

    def shard_groups(
        self, configuration: Configuration, torchs: dist.ProcessGroup, scatters: bool
    ) -> list[dist.ProcessGroup]:
        """The groups on which the model's parts travel, one for each channel.

        Args:
            torchs: torch's own group of these ranks.
            scatters: whether gradients are reduced; else parameters are gathered.
        """
        own = scatters and configuration.scatter_group == "own"
        lists = self._flat_groups[: configuration.channels]
        return [
            groups[int(channel > 0)] if own else groups[0] if channel else torchs
            for channel, groups in enumerate(lists)
        ]

    def _needs_groups(self, configuration: Configuration) -> bool:
        return configuration.scatter_group == "own" or super()._needs_groups(configuration)


def _needed(configuration: Configuration, channel: int) -> int:
    """How many groups of ours a channel has."""
    return int(channel > 0) + int(configuration.scatter_group == "own")
