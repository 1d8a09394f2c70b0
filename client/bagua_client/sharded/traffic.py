"""Carries what the units of a sharded model communicate, and tells of it.

``fully_shard`` lets a training replace the objects that gather parameters and that reduce
gradients, and where there are copies of the model (HSDP), it takes any object with a process
group's methods for the group that it sums on over these. Ours pass all on to those that were there,
unless the configuration has another way for it: several channels, by node, another precision,
another algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms import Algorithm
from bagua_client.communication.link import Link
from bagua_client.configuration import Configuration
from bagua_client.sharded.offer import uses_ours
from bagua_client.sharded.shard_communicator import Route, ShardCommunicator
from bagua_client.torch_private.sharded import Unit
from bagua_client.torch_private.wrapper import untraced

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SUMS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)

Begins = Callable[[int, int], Callable[[], None] | None]
"""Told of a unit that is to travel and of its bytes; returns what to call once it is there."""


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
        self._gather_begins, self._scatter_begins = gather_begins, scatter_begins
        self._waiting = waiting

    def install(self) -> None:
        """Have all that is communicated go through here; where torch lets no other object
        communicate, only what is reduced is told of."""
        for place, unit in enumerate(self._units):
            if not unit.is_replaceable:
                unit.tell(partial(self._scatter_begins, place, 0))
                continue
            unit.look_at_objects()
            given = unit.given
            copies = Copies(self, place, given.copies) if unit.sums_by_itself else given.copies
            gather, scatter = Gather(self, place, given.gather), Scatter(self, place, given.scatter)
            unit.communicate_by(gather, scatter, copies)

    def remove(self) -> None:
        """Have what was there before communicate."""
        for unit in self._units:
            if unit.is_replaceable:
                unit.look_at_objects()
                given = unit.given
                unit.communicate_by(given.gather, given.scatter, given.copies)
            else:
                unit.tell(None)

    def gather(
        self,
        base: Any,
        unit: int,
        output: torch.Tensor,
        part: torch.Tensor,
        group: Any,
        async_op: bool,
    ) -> Any:
        """Gather the ranks' parts, one after the other, into ``output``."""
        on_end = self._gather_begins(unit, output.nbytes)
        with self._waiting():
            route = self._route(unit, group, scatters=False)
            work = None
            if route is None:
                work = base(output, part, group, async_op=async_op)
            else:
                self._gather(route, part.view(-1), output)
        if on_end is not None:
            on_end()
        return work

    def _gather(self, route: Route, part: torch.Tensor, output: torch.Tensor) -> None:
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

    def scatter(
        self, base: Any, unit: int, output: torch.Tensor, whole: torch.Tensor, group: Any, op: Any
    ) -> Any:
        """Reduce ``whole`` over the ranks; each keeps its own part in ``output``."""
        on_end = self._scatter_begins(unit, whole.nbytes)
        with self._waiting():
            work = self._scatter(base, unit, output, whole, group, op)
        if on_end is not None:
            on_end()
        return work

    def _scatter(
        self, base: Any, unit: int, output: torch.Tensor, whole: torch.Tensor, group: Any, op: Any
    ) -> Any:
        precision = PRECISIONS.get(self.configuration.wire_precision)
        is_narrow = precision is None or whole.element_size() <= precision.itemsize
        narrow = output if is_narrow else torch.empty_like(output, dtype=precision)
        if not is_narrow:
            whole = whole.to(precision)
        work, route = None, self._route(unit, group, scatters=True)
        if route is None:
            work = base(narrow, whole, group, op)
        else:
            self._reduce(route, unit, narrow.view(-1), whole, op)
        if not is_narrow:
            output.copy_(narrow)
        return work

    def _reduce(
        self, route: Route, unit: int, part: torch.Tensor, whole: torch.Tensor, op: Any
    ) -> None:
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
        on_end = self._scatter_begins(unit, tensor.nbytes)
        precision = PRECISIONS.get(self.configuration.wire_precision, tensor.dtype)
        sent = tensor.to(precision) if precision.itemsize < tensor.element_size() else tensor
        with self._waiting():
            (link or Link([group])).all_reduce(sent.view(-1), options.reduceOp)
        if sent is not tensor:
            tensor.copy_(sent)
        if on_end is not None:
            on_end()
        return None

    def _route(self, unit: int, group: Any, scatters: bool) -> Route | None:
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
        return self._traffic.gather(
            self._base, self._unit, output_tensor, input_tensor, group, async_op
        )


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
        return self._traffic.scatter(self._base, self._unit, output_tensor, input_tensor, group, op)


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
