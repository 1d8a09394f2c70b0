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
from bagua_client.torch_private.sharded import Unit, spread_over


@dataclass(frozen=True)
class Route:
    """How the model's parts travel.

    Attributes:
        across: between all ranks that hold them, or between one rank of each node.
        inside: between the ranks of a node, where these are apart; None: they are not.
    """

    across: Link
    inside: Link | None = None


def group_of(units: Sequence[Unit]) -> dist.ProcessGroup | None:
    """The process group of the ranks that train a model, which change it together: with tensor
    parallelism also those that have other parts of its weights. None: torch has none.

    Of some of the job's ranks there is mostly none but that of one unit's: then those that share
    the model's parts with this rank change it by themselves, if all units are spread alike.
    """
    everyone = frozenset[int]().union(*(unit.all_ranks for unit in units))
    for unit in units:
        if everyone == {*unit.ranks}:
            return unit.own_group
        if everyone == {*unit.ranks_of_copies} and unit.sums_by_itself:
            copies: dist.ProcessGroup = unit.given.copies
            return copies
    if len(everyone) == dist.get_world_size():
        return dist.group.WORLD
    is_alike = len({unit.ranks for unit in units}) == 1
    has_copies = any(unit.given.copies is not None for unit in units)
    return units[0].own_group if is_alike and not has_copies else None


Partition = tuple[tuple[int, ...], ...]
"""Of the ranks: each is in one of these sets."""


class ShardCommunicator(Communicator):
    """Its channels are between the ranks that hold the parts of each unit.

    Units may be spread over different ranks: those of a model's experts over fewer than the others,
    say. And beside the ranks of one unit there may be others that do not have the same, but what
    something else has split off, as tensor parallelism does. On each channel there is a group for
    each set of ranks, the first of which is torch's; and one more to reduce gradients on, if that
    has its own. With several channels it has not: what is gathered and what is reduced have more
    than one group to travel on anyway. By node, each channel has a group inside the node and one
    across nodes, for what is spread over all ranks. Between copies of the model there is a group on
    each channel too.

    Args:
        group: of all ranks that train the model.
        shards, copies: for each unit the ranks of ``group`` that have its parts, with this one; and
            those that have the same part of other copies of the model.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        shards: Sequence[Sequence[int]],
        copies: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(group, device)
        found = self._partitions([*shards, *copies])
        self._shards, self._copies = found[: len(shards)], found[len(shards) :]
        # Beside torch's, in the same order on all ranks.
        self._more: dict[Partition, list[dist.ProcessGroup]] = {each: [] for each in found}
        self._inside: list[dist.ProcessGroup] = []
        self._across: list[dist.ProcessGroup] = []

    def _partitions(self, own: Sequence[Sequence[int]]) -> list[Partition]:
        """All ranks' sets, for each of these of this rank."""
        firsts = torch.tensor([min(ranks) for ranks in own], device=self.device)
        by_rank = [torch.zeros_like(firsts) for _ in range(self.world_size)]
        dist.all_gather(by_rank, firsts, group=self.everyone)
        found = []
        for firsts_of_one in torch.stack(by_rank).T.tolist():
            sets: dict[int, list[int]] = {}
            for rank, first in enumerate(firsts_of_one):
                sets.setdefault(first, []).append(rank)
            found.append(tuple(map(tuple, sets.values())))
        return found

    @property
    def has_nodes(self) -> bool:
        """Whether some units are spread over several nodes with several ranks each, all ranks in
        their order, so that they can travel by node."""
        nodes = self.topology.nodes
        in_order = [rank for node in nodes for rank in node] == list(range(self.world_size))
        is_even = self.topology.is_hierarchical and self.topology.is_uniform
        return is_even and in_order and any(map(self.is_everywhere, range(len(self._shards))))

    def is_everywhere(self, unit: int) -> bool:
        """Whether a unit is spread over all ranks that train the model."""
        return len(self._shards[unit]) == 1

    @property
    def has_copies(self) -> bool:
        """Whether gradients of some units are summed over several copies of the model."""
        return any(len(each[0]) > 1 for each in self._copies)

    def prepare(self, configuration: Configuration, exchanges: int = 1) -> None:
        """See :meth:`Communicator.prepare`."""
        self.check(configuration)
        self._failure = None
        while len(self._inside) < self._node_groups_of(configuration):
            self._inside.append(self._channel_group(self.topology.nodes, by_node=True))
            self._across.append(self._channel_group(self.topology.across, by_node=True))
        for partition, groups in self._more.items():
            while len(groups) < self._needed(partition, configuration):
                # As by node, where a channel has several groups: all kernels fit on the GPU.
                groups.append(self._channel_group(partition, by_node=True))
        if self._failure is not None:
            raise self._failure

    def between_copies(
        self, unit: int, configuration: Configuration, torchs: dist.ProcessGroup
    ) -> Link | None:
        """How gradients of a unit are summed over the copies of the model; None: as torch does it.

        Args:
            torchs: torch's own group for that.
        """
        partition = self._copies[unit]
        if configuration.channels == 1 or dist.get_world_size(torchs) != len(partition[0]):
            return None
        return Link([torchs, *self._more[partition][: configuration.channels - 1]])

    def route(
        self, unit: int, configuration: Configuration, torchs: dist.ProcessGroup, scatters: bool
    ) -> Route | None:
        """How a unit's parts travel; None: as torch has them travel.

        Args:
            torchs: torch's own group of these ranks. Where a training has parameters spread over
                fewer ranks after forward, they are gathered again on that group alone.
            scatters: whether gradients are reduced; else parameters are gathered.
        """
        partition = self._shards[unit]
        if dist.get_world_size(torchs) < len(partition[0]):
            return None
        by_node = self._needed_by_node(configuration)
        if by_node and self.is_everywhere(unit):
            return Route(Link(self._across[:by_node]), Link(self._inside[:by_node]))
        more = self._more[partition][: self._needed(partition, configuration)]
        if configuration.channels > 1:
            return Route(Link([torchs, *more[: configuration.channels - 1]]))
        return Route(Link(more[:1] if scatters and more else [torchs]))

    def _needed(self, partition: Partition, configuration: Configuration) -> int:
        """How many groups there are of a partition, beside torch's."""
        if len(partition[0]) == 1:
            return 0
        if partition in self._shards:
            if len(partition) == 1 and self._needed_by_node(configuration):
                return 0
            if configuration.channels == 1:
                return int(configuration.scatter_group == "own")
        return configuration.channels - 1

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
        by_node = self._node_groups_of(configuration)
        unneeded = [*self._inside[by_node:], *self._across[by_node:]]
        del self._inside[by_node:], self._across[by_node:]
        for partition, groups in self._more.items():
            needed = self._needed(partition, configuration)
            unneeded += groups[needed:]
            del groups[needed:]
        return unneeded

    def _needs_groups(self, configuration: Configuration) -> bool:
        has_own = configuration.scatter_group == "own" or configuration.node_copy == "on"
        return has_own or super()._needs_groups(configuration)
