"""The process groups between the ranks that hold the parts of one sharded model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator
from bagua_client.communication.link import Link
from bagua_client.configuration import Configuration
from bagua_client.torch_private.sharded import spread_over


@dataclass(frozen=True)
class Route:
    """How the model's parts travel.

    Attributes:
        across: between all ranks that hold them, or between one rank of each node.
        inside: between the ranks of a node, where these are apart; None: they are not.
    """

    across: Link
    inside: Link | None = None


class ShardCommunicator(Communicator):
    """Its channels are between the ranks that hold the parts of one copy of the model.

    On each channel there is a group, the first of which is torch's; and one more to reduce
    gradients on, if that has its own. With several channels it has not: what is gathered and what
    is reduced have more than one group to travel on anyway. By node, each channel has a group
    inside the node and one across nodes. Between the copies there is a group on each channel too.

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
        self._between_copies: list[dist.ProcessGroup] = []
        self._inside: list[dist.ProcessGroup] = []
        self._across: list[dist.ProcessGroup] = []

    @property
    def has_nodes(self) -> bool:
        """Whether a copy of the model is spread over several nodes with several ranks each, in
        their order, so that its parts can travel by node."""
        nodes = self.topology.nodes
        in_order = [rank for node in nodes for rank in node] == list(range(self.world_size))
        is_even = self.topology.is_hierarchical and self.topology.is_uniform
        return is_even and in_order and len(self._shards) == 1

    def prepare(self, configuration: Configuration, exchanges: int = 1) -> None:
        """See :meth:`Communicator.prepare`."""
        self.check(configuration)
        self._failure = None
        while len(self._inside) < self._node_groups_of(configuration):
            self._inside.append(self._channel_group(self.topology.nodes, by_node=True))
            self._across.append(self._channel_group(self.topology.across, by_node=True))
        while len(self._flat_groups) < self._needed(configuration):
            # As by node, where a channel has several groups: all kernels fit on the GPU.
            self._flat_groups.append([self._channel_group(self._shards, by_node=True)])
        while len(self._between_copies) < self._needed_between_copies(configuration):
            same_part = list(zip(*self._shards, strict=True))
            self._between_copies.append(self._channel_group(same_part, by_node=True))
        if self._failure is not None:
            raise self._failure

    def between_copies(
        self, configuration: Configuration, torchs: dist.ProcessGroup
    ) -> Link | None:
        """How gradients are summed over the copies of the model; None: as torch does it.

        Args:
            torchs: torch's own group for that.
        """
        needed = self._needed_between_copies(configuration)
        if not needed or dist.get_world_size(torchs) != len(self._shards):
            return None
        return Link([torchs, *self._between_copies[:needed]])

    def _needed_between_copies(self, configuration: Configuration) -> int:
        """How many groups there are beside torch's."""
        return configuration.channels - 1 if len(self._shards) > 1 else 0

    def route(
        self, configuration: Configuration, torchs: dist.ProcessGroup, scatters: bool
    ) -> Route | None:
        """How the model's parts travel; None: as torch has them travel.

        Args:
            torchs: torch's own group of these ranks. Where a training has parameters spread over
                fewer ranks after forward, they are gathered again on that group alone.
            scatters: whether gradients are reduced; else parameters are gathered.
        """
        if dist.get_world_size(torchs) < len(self._shards[0]):
            return None
        if by_node := self._needed_by_node(configuration):
            return Route(Link(self._across[:by_node]), Link(self._inside[:by_node]))
        more = [groups[0] for groups in self._flat_groups[1 : self._needed(configuration)]]
        if configuration.channels > 1:
            return Route(Link([torchs, *more]))
        return Route(Link(more if scatters and more else [torchs]))

    def _needed(self, configuration: Configuration) -> int:
        """How many groups travel at once, with torch's."""
        if self._needed_by_node(configuration):
            return 1
        if configuration.channels == 1 and configuration.scatter_group == "own":
            return 2
        return configuration.channels

    def _needed_by_node(self, configuration: Configuration) -> int:
        return configuration.channels if configuration.hierarchical != "off" else 0

    def nodes(self, configuration: Configuration) -> Any:
        """The nodes over which parameters stay spread after forward; None: over all ranks."""
        if configuration.node_copy == "off":
            return None
        nodes = [[dist.get_global_rank(self.everyone, r) for r in n] for n in self.topology.nodes]
        return spread_over(nodes, self._inside[0], self._across[0], self.device.type)

    def _node_groups_of(self, configuration: Configuration) -> int:
        """How many groups there are inside each node."""
        return max(self._needed_by_node(configuration), int(configuration.node_copy == "on"))

    def _give_up(self, configuration: Configuration) -> list[dist.ProcessGroup]:
        needed, by_node = self._needed(configuration), self._node_groups_of(configuration)
        unneeded = [group for groups in self._flat_groups[needed:] for group in groups]
        unneeded += [*self._inside[by_node:], *self._across[by_node:]]
        del self._flat_groups[needed:], self._inside[by_node:], self._across[by_node:]
        between = self._needed_between_copies(configuration)
        unneeded += self._between_copies[between:]
        del self._between_copies[between:]
        return unneeded

    def _needs_groups(self, configuration: Configuration) -> bool:
        has_own = configuration.scatter_group == "own" or configuration.node_copy == "on"
        return has_own or super()._needs_groups(configuration)
