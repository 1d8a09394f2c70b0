"""The process groups between the ranks that hold the parts of one sharded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration


class ShardCommunicator(Communicator):
    """Its channels are between the ranks that hold the parts of one copy of the model.

    On each channel there is a group, the first of which is torch's; and one more to reduce
    gradients on, if that has its own. With several channels it has not: what is gathered and what
    is reduced have more than one group to travel on anyway.

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
        while len(self._flat_groups) < self._needed(configuration):
            # As by node, where a channel has several groups: all kernels fit on the GPU.
            self._flat_groups.append([self._channel_group(self._shards, by_node=True)])
        if self._failure is not None:
            raise self._failure

    def shard_groups(
        self, configuration: Configuration, torchs: dist.ProcessGroup, scatters: bool
    ) -> list[dist.ProcessGroup]:
        """The groups on which the model's parts travel, one for each channel.

        Args:
            torchs: torch's own group of these ranks. Where a training has parameters spread over
                fewer ranks after forward, they are gathered again on that group alone.
            scatters: whether gradients are reduced; else parameters are gathered.
        """
        if dist.get_world_size(torchs) < len(self._shards[0]):
            return [torchs]
        more = [groups[0] for groups in self._flat_groups[1 : self._needed(configuration)]]
        if configuration.channels == 1:
            return more if scatters and more else [torchs]
        return [torchs, *more]

    def _needed(self, configuration: Configuration) -> int:
        """How many groups travel at once, with torch's."""
        if configuration.channels == 1 and configuration.scatter_group == "own":
            return 2
        return configuration.channels

    def _give_up(self, configuration: Configuration) -> list[dist.ProcessGroup]:
        needed = self._needed(configuration)
        unneeded = [group for groups in self._flat_groups[needed:] for group in groups]
        del self._flat_groups[needed:]
        return unneeded

    def _needs_groups(self, configuration: Configuration) -> bool:
        return configuration.scatter_group == "own" or super()._needs_groups(configuration)
