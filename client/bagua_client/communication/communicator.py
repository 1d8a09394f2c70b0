"""The process groups of one model, and the chains of operations that sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from bagua_client.communication import process_groups
from bagua_client.communication.agreement import Group
from bagua_client.communication.operations import (
    AllGatherShards,
    AllReduce,
    Broadcast,
    OnShard,
    Operation,
    Reduce,
    ReduceScatter,
)
from bagua_client.communication.topology import Topology, discover
from bagua_client.configuration import Configuration
from bagua_client.torch_private import groups as torch_groups
from bagua_wire.knobs import CHANNELS_VALUES


@dataclass(frozen=True)
class NodeGroups:
    """The groups of a hierarchical reduction on one channel, from one rank's point of view.

    The operations of a chain run on different buckets at the same time. Each operation has its own
    group, so that all ranks issue operations in the same order on each group.
    """

    inside_first: dist.ProcessGroup
    across: list[dist.ProcessGroup]
    inside_last: dist.ProcessGroup
    leader: int
    is_leader: bool


CONNECT_SECONDS = 30.0
"""Longest time for the ranks of a new gloo group to find each other."""

NOBODY_ELSE = "a single rank communicates nothing"

FAILED = -1
"""Voted in place of a number by a rank that could not make the group before."""

Exchange = Callable[[Sequence[dist.ProcessGroup]], Sequence[Operation]]

_groups_made = 0
"""All groups that this rank made have smaller numbers. Under the name of a destroyed group
a new one would find the old addresses in the store."""


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """What a model on this device communicates from: over gloo the CPU."""
    return torch.device("cpu") if dist.get_backend(group) == dist.Backend.GLOO else device


class Communicator:
    """The process groups of the ranks that train one model. All ranks must make theirs together.

    Buckets travel on channels in turn; large buckets are split into parts. Each channel has its own
    process groups, so that what travels on one channel does not wait for another. The first
    channel's flat group is the user's. For each place in a chain, one thread issues what travels on
    a channel, in the order of the layout. So all ranks issue the same order on each group, provided
    that each operation of an exchange has its own group.

    On CUDA each chain is issued as a whole, in the order of the layout, whatever its channel. The
    kernels of several NCCL groups fit on the GPU together (see process_groups).

    Attributes:
        group: the process group of all these ranks, in which they agree; None: there is but this
            process, see :class:`Alone`.
        everyone: the same group; where there is none, nothing that communicates is asked for.
        device: a device that the group communicates from.
        topology: which of the ranks share a node.
        is_left: whether the ranks do not train the model together any more.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group: Group = group
        self.everyone = group
        self.device = device
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.topology = discover(group, device)
        self._flat_groups = [[group]]
        self._node_groups: list[NodeGroups] = []
        self._made: dict[dist.ProcessGroup, tuple[Hashable, int]] = {}
        self._failure: Exception | None = None
        self.is_left = False

    @property
    def backend(self) -> str:
        """The name of the group's; empty: there is no group."""
        return str(dist.get_backend(self.everyone))

    @property
    def name(self) -> str:
        """The group's."""
        return str(self.everyone.group_name)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The numbers of these ranks in the default group, ascending."""
        return tuple(dist.get_process_group_ranks(self.everyone))

    @property
    def job_ranks(self) -> int:
        """How many ranks the default group has."""
        return dist.get_world_size()

    def when_destroyed(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called when the ranks' groups are destroyed, as by
        :func:`bagua_client.torch_private.groups.when_destroyed`."""
        torch_groups.when_destroyed(callback)

    @property
    def obstacle(self) -> str:
        """Why no more groups can be made for these ranks; empty: they can.

        Where the default group is bound to a device, as that of torch 2.15's NCCL always is, c10d
        makes NCCL groups by splitting it. All ranks of the job must take part in a split, and those
        outside ``group`` do not.
        """
        if dist.get_backend(self.everyone) == "gloo":
            return ""
        if unknown := torch_groups.unknown_kind(self.everyone, self.device):
            return (
                f"how much of a GPU the groups of the backend {unknown} take is not known, and "
                "several that do not fit together would hang"
            )
        is_part = self.world_size < dist.get_world_size()
        if is_part and torch_groups.is_bound_to_device():
            return (
                f"its model trains on {self.world_size} of the job's {dist.get_world_size()} "
                "ranks, and as the group of all ranks is bound to a device, torch splits it for "
                "each new one, which all of them would have to join. Leave device_id out of "
                "init_process_group (with torch 2.15, also give it backend='nccl-legacy'), or use "
                "one channel and hierarchical='off'"
            )
        return ""

    @property
    def most_channels(self) -> int:
        """The highest number of channels possible; equal on all ranks with the same devices."""
        if self.obstacle:
            return 1
        return process_groups.most_channels(self.device) if self._is_nccl else max(CHANNELS_VALUES)

    @property
    def why_one_channel(self) -> str:
        """Why more channels than one, which are possible, would gain nothing; empty: they may."""
        return process_groups.why_one_channel(self.device, len(self.topology.nodes))

    @property
    def _is_nccl(self) -> bool:
        return torch_groups.is_nccl(self.everyone, self.device)

    def check(self, configuration: Configuration) -> None:
        """Check that the groups that ``configuration`` needs can be made.

        Raises:
            RuntimeError: they cannot; raised on all ranks or on none, if their devices are equal.
        """
        if self._needs_groups(configuration) and self.obstacle:
            raise RuntimeError(
                f"the configuration ({configuration}) needs process groups that rank {self.rank} "
                f"cannot make: {self.obstacle}"
            )
        if configuration.channels > self.most_channels:
            raise RuntimeError(
                f"rank {self.rank}: this GPU has room for {self.most_channels} channels, not "
                f"{configuration.channels}"
            )

    def prepare(self, configuration: Configuration, exchanges: int = 1) -> None:
        """Make the missing ones of the groups that ``configuration`` needs.

        All ranks must call it together, with the same configuration.

        Args:
            exchanges: number of operations in one exchange between the ranks.

        Raises:
            RuntimeError: see :meth:`check`; nothing was made.
            Exception: this rank or another one could not make a group. Those that were made are
                there until :meth:`release`.
        """
        self.check(configuration)
        self._failure = None
        # On CUDA each chain is issued as a whole, so all ranks issue the same order on one group.
        needed = 1 if self.device.type == "cuda" else exchanges
        by_node = self._reduces_by_node(configuration)
        everyone = self.topology.across if by_node else [range(self.world_size)]
        while by_node and len(self._node_groups) < configuration.channels:
            self._node_groups.append(self._make_node_groups())
        while not by_node and len(self._flat_groups) < configuration.channels:
            self._flat_groups.append([])
        lists = [groups.across for groups in self._node_groups] if by_node else self._flat_groups
        for groups in lists[: configuration.channels]:
            while len(groups) < needed:
                groups.append(self._channel_group(everyone, by_node))
        if self._failure is not None:
            raise self._failure

    def release(self, configuration: Configuration) -> None:
        """Destroy the groups that ``configuration`` does not need; nothing may be in flight.

        All ranks must call it together. :meth:`prepare` can make them again.
        """
        unneeded = [each for each in self._give_up(configuration) if each is not self.everyone]
        if unneeded and self.device.type == "cuda":
            # Operations that the host has finished with may still run on the device.
            torch.cuda.synchronize(self.device)
        for group in unneeded:
            self._made.pop(group, None)
            dist.destroy_process_group(group)

    def _give_up(self, configuration: Configuration) -> list[dist.ProcessGroup]:
        """Forget the groups that ``configuration`` does not need. Returns them; the user's may be
        among them, see :meth:`_channel_group`."""
        by_node = self._reduces_by_node(configuration)
        flat_channels = 1 if by_node else configuration.channels
        node_channels = configuration.channels if by_node else 0
        unneeded = [group for groups in self._flat_groups[flat_channels:] for group in groups]
        for each in self._node_groups[node_channels:]:
            unneeded += [each.inside_first, *each.across, each.inside_last]
        del self._flat_groups[flat_channels:], self._node_groups[node_channels:]
        return unneeded

    def close(self) -> None:
        """The model is gone on this rank: its groups are there for the next one. Not collective."""
        while self._made:
            group, (kind, birth) = self._made.popitem()
            process_groups.keep_spare(kind, birth, group)

    def leave(self) -> None:
        """Let go of all groups but the user's, which was destroyed, or is not the model's any more.
        Not collective: some of its ranks may be gone."""
        self.is_left = True
        self._give_up(Configuration())
        for groups in self._flat_groups:
            del groups[1:]
        for group in list(self._made):
            # What NCCL does at an end may wait for the other ranks.
            if torch_groups.is_alive(group) and dist.get_backend(group) == dist.Backend.GLOO:
                del self._made[group]
                dist.destroy_process_group(group)
        self.close()

    def sum_operations(
        self,
        configuration: Configuration,
        channel: int,
        exchange: Exchange = lambda groups: (AllReduce(groups[0]),),
    ) -> tuple[Operation, ...]:
        """The chain that leaves the sum over all ranks on all ranks, for a bucket on ``channel``.

        Call :meth:`prepare` first. Every operation sums and none averages, so that all ranks count
        equally, however many ranks their nodes have. On one node, or with one rank on each node,
        the chain is always flat. On nodes of different sizes ``shards`` means ``leaders``.

        Args:
            exchange: makes the operations that leave the sum over a group's ranks on all of these
                ranks. Its argument is a list of groups over the same ranks (all ranks, or one rank
                of each node): as many as the ``exchanges`` given to :meth:`prepare`, on CUDA one.
        """
        if not self._reduces_by_node(configuration):
            return tuple(exchange(self._flat_groups[channel]))
        groups = self._node_groups[channel]
        if configuration.hierarchical == "shards" and self.topology.is_uniform:
            return (
                ReduceScatter(groups.inside_first),
                *(OnShard(groups.inside_first, each) for each in exchange(groups.across)),
                AllGatherShards(groups.inside_last),
            )
        reduce = Reduce(groups.inside_first, groups.leader)
        broadcast = Broadcast(groups.inside_last, groups.leader)
        if groups.is_leader:
            return (reduce, *exchange(groups.across), broadcast)
        return (reduce, broadcast)

    def ranks_across(self, configuration: Configuration) -> int:
        """Number of ranks in an exchange: one of each node, or all ranks if they reduce flat."""
        by_node = self._reduces_by_node(configuration)
        return len(self.topology.nodes) if by_node else self.world_size

    @property
    def ranks_beside(self) -> int:
        """Number of ranks on this rank's node."""
        return next(len(ranks) for ranks in self.topology.nodes if self.rank in ranks)

    def padding_multiple(self, configuration: Configuration) -> int:
        """The number that must divide a bucket's element count."""
        shards = configuration.hierarchical == "shards" and self._reduces_by_node(configuration)
        return self.topology.ranks_per_node[0] if shards and self.topology.is_uniform else 1

    def _needs_groups(self, configuration: Configuration) -> bool:
        return self._reduces_by_node(configuration) or configuration.channels > 1

    def _reduces_by_node(self, configuration: Configuration) -> bool:
        return configuration.hierarchical != "off" and self.topology.is_hierarchical

    def _make_node_groups(self) -> NodeGroups:
        nodes = self.topology.nodes
        node = next(ranks for ranks in nodes if self.rank in ranks)
        return NodeGroups(
            inside_first=self._channel_group(nodes, by_node=True),
            across=[],
            inside_last=self._channel_group(nodes, by_node=True),
            leader=dist.get_global_rank(self.everyone, node[0]),
            is_leader=self.rank == node[0],
        )

    def _channel_group(
        self, partition: Sequence[Sequence[int]], by_node: bool = False
    ) -> dist.ProcessGroup:
        """A group of one channel. A rank that cannot make it goes on to the next one, where it
        tells the others, which may wait for it there: then all raise. Until then it has another."""
        is_first = self._failure is None
        try:
            return self._new_channel_group(partition, by_node)
        except Exception as error:
            if not is_first or isinstance(error, _FailedElsewhere):
                raise
            self._failure = error
            return self.everyone

    def _new_channel_group(
        self, partition: Sequence[Sequence[int]], by_node: bool
    ) -> dist.ProcessGroup:
        if dist.get_backend(self.everyone) == "gloo":
            return self.new_gloo_group(partition)
        if not self._is_nccl:
            return self.new_group(partition)
        name = torch_groups.backend_name(self.everyone, self.device)
        return self.new_group(partition, name, options=process_groups.options(self.device, by_node))

    def new_gloo_group(self, partition: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """See :meth:`new_group`. A rank that cannot make it holds the others up only for as long as
        connecting may take, and not for as long as a collective may."""
        group = self.new_group(partition, "gloo", timedelta(seconds=CONNECT_SECONDS))
        usual = torch_groups.timeout_of(self.everyone, self.device)
        torch_groups.set_timeout(group, usual or torch_groups.DEFAULT_TIMEOUT)
        return group

    def new_group(
        self,
        partition: Sequence[Sequence[int]],
        backend: str | None = None,
        timeout: timedelta | None = None,
        options: torch_groups.Options | None = None,
    ) -> dist.ProcessGroup:
        """Make one new group for each part of ``partition`` (ranks of ``self.group``), or take
        those of a model that is gone. All ranks must call it together, with the same partition.

        Args:
            backend, timeout: None: those of ``self.group``.
            options: the backend's options.

        Returns:
            The new group that this rank is in.

        Raises:
            ValueError: this rank is in no part.
        """
        parts = [[dist.get_global_rank(self.everyone, rank) for rank in part] for part in partition]
        timeout = timeout or torch_groups.timeout_of(self.everyone, self.device)
        # By default c10d takes the backend of the default group, not that of ``self.group``.
        backend = backend or dist.get_backend(self.everyone)
        if options is not None:
            torch_groups.set_timeout_in(options, timeout)
        limit = None if options is None else process_groups.limit_of(options)
        kind = (tuple(map(tuple, parts)), backend, timeout, limit)
        birth, spare = self._next_number(kind, partition)
        own = process_groups.take_spare(kind, spare) if spare is not None else None
        for part, ranks in zip(parts, partition, strict=True) if own is None else ():
            if self.world_size == dist.get_world_size():
                group = dist.new_group(part, timeout, backend, options)
            elif self.rank in ranks:
                # Ranks outside ``self.group`` do not call this.
                with torch_groups.counting_groups_from(birth):
                    group = dist.new_group(
                        part, timeout, backend, options, use_local_synchronization=True
                    )
            if self.rank in ranks:
                own = group
        if own is None:
            raise ValueError(f"rank {self.rank} is in no part of {partition}")
        self._made[own] = kind, spare if spare is not None else birth
        return own

    def _next_number(
        self, kind: Hashable, partition: Sequence[Sequence[int]]
    ) -> tuple[int, int | None]:
        """A number that no group of these ranks has had yet, and that of spare groups that can be
        used instead of new ones."""
        global _groups_made
        highest = max(len(torch_groups.pg_names()), _groups_made)
        if self._failure is not None:
            highest = FAILED
        own = torch.tensor([highest, *process_groups.offer_spares(kind)], device=self.device)
        gathered = [torch.zeros_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own, group=self.everyone)
        by_rank = torch.stack(gathered).tolist()
        failed = [rank for rank, (number, *_) in enumerate(by_rank) if number == FAILED]
        if failed:
            ranks = ", ".join(map(str, failed))
            raise self._failure or _FailedElsewhere(f"rank {ranks} could not make a group")
        birth = max(number for number, *_ in by_rank)
        _groups_made = birth + 1
        return birth, process_groups.choose_spare([offers for _, *offers in by_rank], partition)


class _FailedElsewhere(RuntimeError):
    """Raised where another rank could not make a group."""


class Alone(Communicator):
    """Of a process that trains by itself, without any process group; none is made for it, as
    frameworks ask whether there is one.

    Args:
        device: that it trains on.
    """

    def __init__(self, device: torch.device) -> None:
        self.group, self.device = None, device
        self.world_size, self.rank = 1, 0
        self.topology = Topology(((0,),))
        self.is_left = False

    @property
    def obstacle(self) -> str:
        return NOBODY_ELSE

    @property
    def backend(self) -> str:
        return ""

    @property
    def name(self) -> str:
        return "alone"

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return (0,)

    @property
    def job_ranks(self) -> int:
        return 1

    def when_destroyed(self, callback: Callable[[], object]) -> None:
        """Groups that the process makes later are not the model's."""

    def prepare(self, configuration: Configuration, exchanges: int = 1) -> None:
        """See :meth:`Communicator.prepare`."""
        self.check(configuration)

    def release(self, configuration: Configuration) -> None:
        """There are no groups."""

    def close(self) -> None:
        """There are no groups."""

    def leave(self) -> None:
        """There are no groups."""
        self.is_left = True
