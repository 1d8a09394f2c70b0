"""Carries what the units of a sharded model communicate, over its process groups, and tells of it.

``fully_shard`` lets a training replace the objects that gather parameters and that reduce
gradients, and where there are copies of the model (HSDP), it takes any object with a process
group's methods for the group that it sums on over these. Ours pass all on to those that were there,
unless the configuration has another way for it: several channels, by node, another precision,
another algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.link import Link
from bagua_client.configuration import Configuration
from bagua_client.torch_private.sharded import Unit, spread_over
from bagua_client.torch_private.wrapper import untraced


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


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)

Begins = Callable[[int, int], Callable[[], None] | None]
"""Told of a unit that is to travel and of its bytes; returns what to call once it is there."""


def uses_ours(configuration: Configuration, scatters: bool = True) -> bool:
    """Whether other process groups than torch's, or more of them, carry the units.

    Args:
        scatters: whether their gradients count, too.
    """
    by_node, has_own = configuration.hierarchical != "off", configuration.scatter_group == "own"
    return by_node or configuration.channels > 1 or (scatters and has_own)


class Traffic:
    """What travels between the ranks of one model.

    Args:
        units: of the model.
        algorithm: how it travels at first.
        gather_begins, scatter_begins: called on each gathering of a unit's parameters, and on each
            reduction of its gradients.
        waiting: returns a context that is entered around what is communicated.

    Attributes:
        algorithm, configuration: how it travels.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: ShardCommunicator,
        algorithm: Algorithm,
        configuration: Configuration,
        gather_begins: Begins,
        scatter_begins: Begins,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.algorithm, self.configuration = algorithm, configuration
        self._units = units
        self._communicator = communicator
        self.gather_begins, self.scatter_begins = gather_begins, scatter_begins
        self._waiting = waiting

    def install(self) -> None:
        """Have all that is communicated go through here; where torch lets no other object
        communicate, only what is reduced is told of."""
        for place, unit in enumerate(self._units):
            if not unit.is_replaceable:
                unit.tell(partial(self.scatter_begins, place, 0))
                continue
            given = unit.objects_given()
            copies = Copies(self, place, given.copies) if unit.sums_by_itself else given.copies
            gather, scatter = Gather(self, place, given.gather), Scatter(self, place, given.scatter)
            unit.communicate_by(gather, scatter, copies)

    def remove(self) -> None:
        """Have what was there before communicate."""
        for unit in self._units:
            if unit.is_replaceable:
                given = unit.objects_given()
                unit.communicate_by(given.gather, given.scatter, given.copies)
            else:
                unit.tell(None)

    @contextmanager
    def travels(self, begins: Begins, unit: int, size_bytes: int) -> Iterator[None]:
        """Around what a unit communicates."""
        on_end = begins(unit, size_bytes)
        with self._waiting():
            yield
        if on_end is not None:
            on_end()

    def gather(self, route: Route, part: torch.Tensor, output: torch.Tensor) -> None:
        """Gather the ranks' parts, one after the other, into ``output``."""
        across, inside = route.across, route.inside
        if inside is None:
            self.algorithm.gather(across, part, output.view(across.ranks, -1))
            return
        of_nodes = part.new_empty(across.ranks, part.numel())
        self.algorithm.gather(across, part, of_nodes)
        by_local_rank = part.new_empty(inside.ranks, of_nodes.numel())
        inside.all_gather(of_nodes.view(-1), by_local_rank)
        by_local_rank = by_local_rank.view(inside.ranks, across.ranks, -1)
        output.view(across.ranks, inside.ranks, -1).copy_(by_local_rank.transpose(0, 1))

    def reduce(
        self, route: Route, unit: int, part: torch.Tensor, whole: torch.Tensor, op: Any
    ) -> None:
        """Reduce ``whole`` over the ranks; each keeps its own ``part``."""
        across, inside = route.across, route.inside
        if inside is None:
            by_rank = whole.view(across.ranks, -1)
            self.algorithm.reduce(across, by_rank, part, op, unit)
            return
        by_node = whole.view(across.ranks, inside.ranks, -1).transpose(0, 1).contiguous()
        own = part.new_empty(across.ranks * part.numel())
        inside.reduce_scatter(by_node.view(inside.ranks, -1), own, op)
        # What is scaled before it is summed is scaled once.
        again = op if op in SUMS else dist.ReduceOp.SUM
        self.algorithm.reduce(across, own.view(across.ranks, -1), part, again, unit)

    def sum_copies(self, unit: int, group: Any, tensors: list[torch.Tensor], options: Any) -> Any:
        """Sum up what each copy of the model has of the gradients, as ``group`` would. Where each
        rank has a copy of its own, that is all that is reduced."""
        link = self._communicator.between_copies(unit, self.configuration, group)
        (tensor,) = tensors
        if not self._units[unit].is_whole:
            if link is None:
                return group.allreduce(tensors, options)
            link.all_reduce(tensor.view(-1), options.reduceOp)
            return None
        sent = tensor.to(self.narrower(tensor) or tensor.dtype)
        with self.travels(self.scatter_begins, unit, tensor.nbytes):
            (link or Link([group])).all_reduce(sent.view(-1), options.reduceOp)
        if sent is not tensor:
            tensor.copy_(sent)
        return None

    def narrower(self, tensor: torch.Tensor) -> torch.dtype | None:
        """What gradients travel in, if that is narrower than they are."""
        precision = PRECISIONS.get(self.configuration.wire_precision)
        is_narrow = precision is None or tensor.element_size() <= precision.itemsize
        return None if is_narrow else precision

    def route(self, unit: int, group: Any, scatters: bool) -> Route | None:
        """None: torch's own objects do it."""
        configuration = self.configuration
        if self.algorithm.is_torchs and not uses_ours(configuration, scatters):
            return None
        return self._communicator.route(unit, configuration, group, scatters)


class _Carrier:
    """Stands in the place of an object of torch's that communicates a unit.

    Args:
        unit: its place among the model's units.
        base: the object that was there before.
    """

    def __init__(self, traffic: Traffic, unit: int, base: Any) -> None:
        self._traffic = traffic
        self._unit = unit
        self._base = base

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What a training sets later (``set_allocate_memory_from_process_group_for_comm``) torch
        sets in the place of its own objects only."""
        return type(self._base)

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> torch.Tensor:
        found: torch.Tensor = self._base.allocate(size, dtype=dtype, device=device)
        return found


class Gather(_Carrier):
    """Gathers the parameters of a unit, as torch's ``AllGather`` does."""

    @untraced
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        traffic, unit = self._traffic, self._unit
        with traffic.travels(traffic.gather_begins, unit, output_tensor.nbytes):
            route = traffic.route(unit, group, scatters=False)
            if route is None:
                return self._base(output_tensor, input_tensor, group, async_op=async_op)
            traffic.gather(route, input_tensor.view(-1), output_tensor)
        return None


class Scatter(_Carrier):
    """Reduces the gradients of a unit, as torch's ``ReduceScatter`` does."""

    @untraced
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        traffic, unit, work = self._traffic, self._unit, None
        with traffic.travels(traffic.scatter_begins, unit, input_tensor.nbytes):
            narrow, precision = output_tensor, traffic.narrower(input_tensor)
            if precision is not None:
                narrow = torch.empty_like(output_tensor, dtype=precision)
                input_tensor = input_tensor.to(precision)
            route = traffic.route(unit, group, scatters=True)
            if route is None:
                work = self._base(narrow, input_tensor, group, op)
            else:
                traffic.reduce(route, unit, narrow.view(-1), input_tensor, op)
            if precision is not None:
                output_tensor.copy_(narrow)
        return work


class Copies:
    """Stands in the place of the process group on which torch sums over the copies of a unit.

    Args:
        unit: its place among the model's units.
        group: that one.
    """

    def __init__(self, traffic: Traffic, unit: int, group: Any) -> None:
        self._traffic = traffic
        self._unit = unit
        self._group = group

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._traffic.sum_copies(self._unit, self._group, tensors, options)

    def __getattr__(self, name: str) -> Any:
        if name == "_group":  # Of a copy that is being made of this it is not there yet.
            raise AttributeError(name)
        return getattr(self._group, name)
