"""Carries what the units of a sharded model communicate, and tells of it.

``fully_shard`` lets a training replace the objects that gather parameters and that reduce
gradients. Ours pass all on to those that were there, unless the configuration has several channels
or another precision: then a tensor travels in stripes, one on each channel's process group, and
arrives as if it had travelled whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.configuration import Configuration
from bagua_client.sharded.shard_communicator import ShardCommunicator
from bagua_client.torch_private.sharded import Unit

SMALLEST_STRIPE_BYTES = 64 * 1024
"""The smallest stripe of one rank's part: each stripe adds the latency of a message."""
ALIGNED_ELEMENTS = 64
"""Each stripe begins at a multiple of this many elements: NCCL copies 16 bytes at a time."""
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Begins = Callable[[int, int], Callable[[], None] | None]
"""Told of a unit that is to travel and of its bytes; returns what to call once it is there."""


class Traffic:
    """What travels between the ranks of one model.

    Args:
        units: of the model.
        gather_begins, scatter_begins: called on each gathering of a unit's parameters, and on each
            reduction of its gradients.
        waiting: returns a context that is entered around what is communicated.

    Attributes:
        configuration: how it travels.
        gathered: the units that were gathered since somebody emptied it, in that order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: ShardCommunicator,
        configuration: Configuration,
        gather_begins: Begins,
        scatter_begins: Begins,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.configuration = configuration
        self._units = units
        self._communicator = communicator
        self._gather_begins, self._scatter_begins = gather_begins, scatter_begins
        self._waiting = waiting
        self.gathered: list[int] = []

    def install(self) -> None:
        """Have all that is communicated go through here; where torch lets no other object
        communicate, only what is reduced is told of."""
        for place, unit in enumerate(self._units):
            if not unit.is_replaceable:
                unit.tell(partial(self._scatter_begins, place, 0))
                continue
            scatter = Scatter(self, place, unit.given.scatter)
            unit.communicate_by(Gather(self, place, unit.given.gather), scatter)

    def remove(self) -> None:
        """Have what was there before communicate."""
        for unit in self._units:
            if unit.is_replaceable:
                unit.communicate_by(unit.given.gather, unit.given.scatter)
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
        self.gathered.append(unit)
        on_end = self._gather_begins(unit, output.nbytes)
        with self._waiting():
            work = self._gather(base, output, part, group, async_op)
        if on_end is not None:
            on_end()
        return work

    def _gather(
        self, base: Any, output: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool
    ) -> Any:
        groups = self._communicator.shard_groups(self.configuration, group, scatters=False)
        if len(groups) == 1:
            return base(output, part, group, async_op=async_op)
        ranks, elements = dist.get_world_size(group), part.numel()
        by_rank = output.view(ranks, elements)
        under_way = []
        for at, (begin, end) in enumerate(self._stripes(part)):
            stripe = torch.empty(ranks * (end - begin), dtype=part.dtype, device=part.device)
            own = part.view(-1)[begin:end]
            work = _all_gather(stripe, own, group=groups[at], async_op=True)
            under_way.append((work, stripe, begin, end))
        for work, stripe, begin, end in under_way:
            work.wait()
            by_rank[:, begin:end].copy_(stripe.view(ranks, end - begin))
        return None

    def scatter(
        self, base: Any, unit: int, output: torch.Tensor, whole: torch.Tensor, group: Any, op: Any
    ) -> Any:
        """Reduce ``whole`` over the ranks; each keeps its own part in ``output``."""
        on_end = self._scatter_begins(unit, whole.nbytes)
        with self._waiting():
            work = self._scatter(base, output, whole, group, op)
        if on_end is not None:
            on_end()
        return work

    def _scatter(
        self, base: Any, output: torch.Tensor, whole: torch.Tensor, group: Any, op: Any
    ) -> Any:
        precision = PRECISIONS.get(self.configuration.wire_precision)
        if precision is None or whole.element_size() <= precision.itemsize:
            work = self._reduce(base, output, whole, group, op)
        else:
            narrow = torch.empty_like(output, dtype=precision)
            work = self._reduce(base, narrow, whole.to(precision), group, op)
            output.copy_(narrow)
        return work

    def _reduce(
        self, base: Any, output: torch.Tensor, whole: torch.Tensor, group: Any, op: Any
    ) -> Any:
        groups = self._communicator.shard_groups(self.configuration, group, scatters=True)
        if self.configuration.channels == 1:
            return base(output, whole, groups[0], op)
        part = output.view(-1)
        by_rank = whole.view(-1, part.numel())
        under_way = []
        for at, (begin, end) in enumerate(self._stripes(part)):
            stripe = by_rank[:, begin:end].contiguous().view(-1)
            own = torch.empty(end - begin, dtype=part.dtype, device=part.device)
            work = _reduce_scatter(own, stripe, op=op, group=groups[at], async_op=True)
            under_way.append((work, stripe, own, begin, end))
        for work, _, own, begin, end in under_way:
            work.wait()
            part[begin:end].copy_(own)
        return None

    def _stripes(self, part: torch.Tensor) -> list[tuple[int, int]]:
        """Where the stripes of one rank's part begin and end."""
        elements = part.numel()
        most = min(self.configuration.channels, max(part.nbytes // SMALLEST_STRIPE_BYTES, 1))
        cuts = [elements * at // most // ALIGNED_ELEMENTS * ALIGNED_ELEMENTS for at in range(most)]
        ends = [*cuts[1:], elements]
        return [(begin, end) for begin, end in zip(cuts, ends, strict=True) if end > begin]


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

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> torch.Tensor:
        found: torch.Tensor = self._base.allocate(size, dtype=dtype, device=device)
        return found


class Gather(_Carrier):
    """Gathers the parameters of a unit, as torch's ``AllGather`` does."""

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

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return self._traffic.scatter(self._base, self._unit, output_tensor, input_tensor, group, op)
