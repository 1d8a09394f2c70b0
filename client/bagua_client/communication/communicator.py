"""The process groups of one model, and the chains of operations that sum over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from bagua_client.communication.operations import (
    AllGatherShards,
    AllReduce,
    AllReduceShard,
    Broadcast,
    Operation,
    Reduce,
    ReduceScatter,
)
from bagua_client.communication.topology import Topology, discover


@dataclass(frozen=True)
class NodeGroups:
    """The groups of a hierarchical reduction, from one rank's point of view.

    The first and the last operation of a chain run inside the node, on different buckets at the
    same time; each has a group of its own, so that all ranks issue the same order on each.
    """

    inside_first: dist.ProcessGroup
    across: dist.ProcessGroup
    inside_last: dist.ProcessGroup
    leader: int
    is_leader: bool


class Communicator:
    """The ranks that train one model together.

    Attributes:
        group: the process group over all of them.
        device: a device that the group communicates from.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @cached_property
    def topology(self) -> Topology:
        """Discovered at first use; all ranks must come to that together."""
        return discover(self.group, self.device)

    @cached_property
    def node_groups(self) -> NodeGroups:
        """Made at first use; all ranks must come to that together."""
        nodes, across = self.topology.nodes, self.topology.across
        node = next(ranks for ranks in nodes if self.rank in ranks)
        return NodeGroups(
            inside_first=self.new_group(nodes),
            across=self.new_group(across),
            inside_last=self.new_group(nodes),
            leader=dist.get_global_rank(self.group, node[0]),
            is_leader=self.rank == node[0],
        )

    def prepare(self, hierarchical: str) -> None:
        """Make what a configuration needs. All ranks must call it with the same value."""
        if hierarchical != "off" and self.topology.is_hierarchical:
            _ = self.node_groups

    def release(self, hierarchical: str) -> None:
        """Let go of what a configuration does not need; nothing may be in flight."""
        if hierarchical == "off" and "node_groups" in self.__dict__:
            groups = self.node_groups
            for group in (groups.inside_first, groups.across, groups.inside_last):
                dist.destroy_process_group(group)
            del self.node_groups

    def sum_operations(self, hierarchical: str) -> tuple[Operation, ...]:
        """The chain that leaves the sum over all ranks on all ranks.

        Call :meth:`prepare` first. Sums stay sums on the way, so that nodes with different
        numbers of ranks count by their ranks. On one node, or with one rank on each, every
        value is the flat all-reduce; ``shards`` on unequal nodes is ``leaders``.
        """
        if hierarchical == "off" or not self.topology.is_hierarchical:
            return (AllReduce(self.group),)
        groups = self.node_groups
        if hierarchical == "shards" and self.topology.is_uniform:
            return (
                ReduceScatter(groups.inside_first),
                AllReduceShard(groups.inside_first, groups.across),
                AllGatherShards(groups.inside_last),
            )
        reduce = Reduce(groups.inside_first, groups.leader)
        broadcast = Broadcast(groups.inside_last, groups.leader)
        if groups.is_leader:
            return (reduce, AllReduce(groups.across), broadcast)
        return (reduce, broadcast)

    def padding_multiple(self, hierarchical: str) -> int:
        """The number that a bucket's elements must divide by."""
        if hierarchical == "shards" and self.topology.is_hierarchical and self.topology.is_uniform:
            return self.topology.ranks_per_node[0]
        return 1

    def new_group(
        self, partition: Sequence[Sequence[int]], backend: str | None = None
    ) -> dist.ProcessGroup:
        """One new group for each part of ``partition`` (ranks inside ``self.group``); answers
        with the one this rank is in. All ranks must call it with the same partition.
        """
        parts = [[dist.get_global_rank(self.group, rank) for rank in part] for part in partition]
        timeout = timeout_of(self.group, self.device)
        if self.world_size != dist.get_world_size():
            self._level_group_names()
        own: dist.ProcessGroup | None = None
        for part, ranks in zip(parts, partition, strict=True):
            if self.world_size == dist.get_world_size():
                group = dist.new_group(part, backend=backend, timeout=timeout)
            elif self.rank in ranks:
                # The ranks outside the sub group do not come here.
                group = dist.new_group(
                    part, backend=backend, timeout=timeout, use_local_synchronization=True
                )
            if self.rank in ranks:
                own = group
        if own is None:
            raise ValueError(f"rank {self.rank} is in no part of {partition}")
        return own

    def _level_group_names(self) -> None:
        """Bring all ranks to the same number of groups.

        c10d names a group that only its members make after the number of groups the rank is in
        already; ranks in different numbers of the user's groups would wait for one another under
        different names. It has no public way to see that number or to set the name.
        """
        own = torch.tensor([len(dist.distributed_c10d._world.pg_names)], device=self.device)
        most = own.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        for _ in range(int(most - own)):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout the user gave the group; None where this torch does not tell.

    c10d has no public getter for it, and a group made without it would wait its backend's
    default, long after the user's own timeout.
    """
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None
