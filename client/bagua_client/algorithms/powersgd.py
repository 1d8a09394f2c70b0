"""Gradients averaged as products of thin matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from bagua_client.algorithms.base import Algorithm, register
from bagua_client.algorithms.companion import Companion, in_bucket
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.compressed_exchange import LowRankBucket, LowRankSum
from bagua_client.communication.operations import Operation
from bagua_client.configuration import Configuration
from bagua_client.torch_private import power_sgd
from bagua_client.torch_private.reducer import GradBucket

# What approximations of low rank begin with: random, then what came of the step before.

SEEDS = 1_000_000_000
"""How many there are, as torch has it."""

Matrix = tuple[torch.Tensor, torch.Tensor]
"""A parameter, and its gradient as a matrix."""


class Starts:
    """A tensor Q of shape (m, rank) for each parameter whose gradient is a matrix of m columns. It
    follows the parameter through every re-cut of the buckets.

    Args:
        state: torch's PowerSGDState.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._kept = Companion(dtype=None)

    def rank_of(self, rows: int, columns: int) -> int:
        """The rank of the approximation of such a matrix."""
        most: int = self._state.matrix_approximation_rank
        return min(rows, columns, most)

    def of(self, lists: Sequence[Sequence[Matrix]], wire: torch.Tensor) -> torch.Tensor:
        """What the matrices' approximations begin with; random where there was no step before. All
        ranks draw the same, those too that do not compress."""
        state = self._state
        parameters = [parameter for same in lists for parameter, _ in same]
        shapes = [(m.shape[1], self.rank_of(*m.shape)) for same in lists for _, m in same]
        is_new = [not state.warm_start or p not in self._kept for p in parameters]
        elements = sum(columns * rank for columns, rank in shapes)
        starts = self._kept.beside(parameters, wire, _in_turn(shapes), elements)
        # Torch draws in its first step for every bucket, also for one without a matrix.
        is_first = state.iter - 1 == state.start_powerSGD_iter
        if any(is_new) or is_first or not state.warm_start:
            generator = torch.Generator().manual_seed(int(state.rng.randint(SEEDS)))
            drawn: list[torch.Tensor] = []
            for same in lists:  # As torch does: other sizes at once are other numbers.
                shape = len(same), *shapes[len(drawn)]
                drawn.extend(torch.randn(shape, generator=generator, dtype=wire.dtype))
            for view, numbers, new in zip(_in_turn(shapes)(starts), drawn, is_new, strict=True):
                if new:
                    view.copy_(numbers)
        return starts

    def state_dict(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return what a checkpoint must hold; ``names`` are by the parameters' identities."""
        _, numbers, position, *_ = self._state.rng.get_state()
        return {
            "rank": self._state.matrix_approximation_rank,
            "random": torch.tensor(numbers.tolist()),
            "position": position,
            "starts": self._kept.state(names) if self._state.warm_start else {},
        }

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Go on with what :meth:`state_dict` gave."""
        numbers = state["random"].numpy().astype("uint32")
        self._state.rng.set_state(("MT19937", numbers, state["position"]))
        # Those of another rank have another shape, and all begin anew.
        is_same = state["rank"] == self._state.matrix_approximation_rank
        self._kept.load(state["starts"] if is_same else {}, names)


def _in_turn(shapes: Sequence[tuple[int, int]]) -> Callable[[torch.Tensor], Iterator[torch.Tensor]]:
    """What splits a flat tensor into matrices of these shapes, one after the other."""

    def views(flat: torch.Tensor) -> Iterator[torch.Tensor]:
        parts = torch.split(flat, [rows * columns for rows, columns in shapes])
        return (part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    return views


WHOLE, LOW_RANK = 1, 2
"""Phases."""


@register("powersgd", "gradients are averaged as products of thin matrices")
class PowerSGDAlgorithm(Algorithm):
    """PowerSGD (Vogels et al., NeurIPS 2019, arXiv 1905.13727), with the arguments of torch's
    PowerSGDState and, bit for bit, the numbers of torch's hook on the same buckets.

    A gradient of n rows travels as P (n x rank) and Q (m x rank); see :class:`LowRankSum`. What has
    one dimension, or is too small to gain, travels as it is. Errors and Q belong to parameters, so
    they follow every re-cut. With nodes that sum up inside first (``shards`` too: a matrix cannot
    be cut) one rank of each node compresses the node's sum.

    Args:
        matrix_approximation_rank: how many columns P and Q have.
        start_powerSGD_iter: how many steps average gradients as they are, first. Here it may be 0.
        min_compression_rate: a matrix is compressed if P and Q have so many times fewer numbers.
        use_error_feedback: a rank adds what its gradients differed by from the mean that it got to
            those of the next step; costs as much memory as the gradients.
        warm_start: a step begins with the Q of the step before, else with a random one.
        random_seed: of the first Q.
        batch_tensors_with_same_shape: matrices of one shape in a bucket are multiplied together.
        hierarchical: begin with reducing inside nodes first.

    Attributes:
        state: torch's PowerSGDState: the arguments, the steps done, ``compression_stats()``.

    Raises:
        ValueError: a rank below 1, a negative number of steps, or a rate that is not positive.
        ImportError: numpy is not installed, which torch's PowerSGDState needs.
    """

    exchanges = 2
    scales_itself = True

    def __init__(
        self,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        random_seed: int = 0,
        batch_tensors_with_same_shape: bool = False,
        hierarchical: bool = False,
    ) -> None:
        if matrix_approximation_rank < 1 or start_powerSGD_iter < 0 or min_compression_rate <= 0:
            raise ValueError(
                "powersgd needs a matrix_approximation_rank of at least 1, a start_powerSGD_iter "
                "of at least 0 and a min_compression_rate above 0, not "
                f"{matrix_approximation_rank}, {start_powerSGD_iter} and {min_compression_rate}"
            )
        arguments: dict[str, Any] = {
            "matrix_approximation_rank": matrix_approximation_rank,
            "min_compression_rate": min_compression_rate,
            "use_error_feedback": use_error_feedback,
            "warm_start": warm_start,
            "random_seed": random_seed,
            "batch_tensors_with_same_shape": batch_tensors_with_same_shape,
        }
        self.state = power_sgd.new_state(start_powerSGD_iter, **arguments)
        self._arguments = {
            **arguments,
            "start_powerSGD_iter": start_powerSGD_iter,
            "hierarchical": hierarchical,
        }
        self.hierarchical = hierarchical
        self._ranks = 1
        # Of each model: a tuning that comes back from another algorithm does not begin with the
        # first steps again.
        self._steps: WeakKeyDictionary[Communicator, int] = WeakKeyDictionary()
        self._communicator: Communicator | None = None
        self._lost, self._starts = Companion(dtype=None), Starts(self.state)
        self._bucket: LowRankBucket | None = None

    def reify(self, communicator: Communicator) -> PowerSGDAlgorithm:
        own = type(self)(**self._arguments)
        own._ranks, own._communicator = communicator.world_size, communicator
        own._steps, own.state.iter = self._steps, self._steps.get(communicator, 0)
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        # Torch's state can only be unpickled where there is a process group.
        return partial(type(self), **self._arguments), ()

    @classmethod
    def offered(cls, parameters: Collection[torch.Tensor]) -> PowerSGDAlgorithm | None:
        # A trial says nothing of it before it compresses, and a training that is tuned has begun.
        return None if find_spec("numpy") is None else cls(start_powerSGD_iter=0)

    # Steps

    @property
    def phase(self) -> int:
        return LOW_RANK if self.state.iter >= self.state.start_powerSGD_iter else WHOLE

    @property
    def progress(self) -> int:
        steps: int = self.state.iter
        return steps

    @property
    def is_warming_up(self) -> bool:
        return self.phase == WHOLE

    def begin(self, phase: int) -> None:
        self.travels_whole = phase == LOW_RANK

    def reduction_begins(self) -> None:
        self.state.iter += 1
        if self._communicator is not None:
            self._steps[self._communicator] = self.state.iter

    def state_dict(self) -> dict[str, Any]:
        own = {
            "steps": self.state.iter,
            "lost": self._lost.state(self.names),
            **self._starts.state_dict(self.names),
        }
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "steps" not in state:
            return
        self.state.iter = state["steps"]
        self._lost.load(state["lost"], self.names)
        self._starts.load_state_dict(state, self.names)

    # Buckets

    def carries(self, flat: torch.Tensor) -> bool:
        return flat.is_floating_point()

    def departs(self, bucket: GradBucket, wire: torch.Tensor) -> None:
        if not self.carries(wire):
            return
        if not self.travels_whole:
            wire.div_(self._ranks)  # As torch's hook does: a factor would round otherwise.
            return
        lost = None
        if self.state.use_error_feedback:
            lost = self._lost.beside(bucket.parameters(), wire, in_bucket(bucket))
            wire.add_(lost)
        self._bucket = self._taken_apart(bucket, wire, lost)

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        if self.travels_whole and configuration.hierarchical != "off":
            configuration = replace(configuration, hierarchical="leaders")
        chain = super().operations(communicator, configuration, channel)
        if self._bucket is not None and self._bucket.lost is not None:
            # This rank's node has it in its sum. Its Q stays as it is, and is another one than the
            # others' if it compresses later; that costs no more than accuracy, once.
            self._bucket.lost.zero_()
        self._bucket = None
        return chain

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        if not self.travels_whole:
            return super().exchange(communicator, groups)
        bucket, self._bucket = self._bucket, None
        assert bucket is not None, "a bucket departs before it is asked how it travels"
        return LowRankSum(groups, self._ranks, bucket).operations

    def _taken_apart(
        self, bucket: GradBucket, wire: torch.Tensor, lost: torch.Tensor | None
    ) -> LowRankBucket:
        rank = self.state.matrix_approximation_rank
        by_shape: dict[torch.Size, list[Matrix]] = {}
        rest = []
        for parameter, gradient in zip(bucket.parameters(), in_bucket(bucket)(wire), strict=True):
            values = _as_it_lies(gradient)
            rows = values.shape[0] if values.dim() and values.numel() else 0
            if rows and self._is_worth(rows, values.numel() // rows):
                matrix = values.view(rows, -1)
                by_shape.setdefault(matrix.shape, []).append((parameter, matrix))
            else:
                rest.append(values.view(-1))
        lists = list(by_shape.values())
        if not self.state.batch_tensors_with_same_shape:
            lists = [[each] for same in lists for each in same]
        self._count(lists, rest)
        starts = self._starts.of(lists, wire)
        return LowRankBucket([[m for _, m in same] for same in lists], rest, rank, starts, lost)

    def _is_worth(self, rows: int, columns: int) -> bool:
        least = self.state.min_compression_rate
        return power_sgd.is_worth(rows, columns, self._starts.rank_of(rows, columns), least)

    def _count(self, lists: Sequence[Sequence[Matrix]], rest: Sequence[torch.Tensor]) -> None:
        """For ``compression_stats()``."""
        as_is = sum(part.numel() for part in rest)
        shapes = [matrix.shape for same in lists for _, matrix in same]
        self.state.total_numel_before_compression += as_is + sum(n * m for n, m in shapes)
        compressed = sum((n + m) * self._starts.rank_of(n, m) for n, m in shapes)
        self.state.total_numel_after_compression += as_is + compressed


def _as_it_lies(gradient: torch.Tensor) -> torch.Tensor:
    """A contiguous view, with the dimensions in the order in which they lie in memory."""
    if gradient.is_contiguous():
        return gradient
    return gradient.permute(sorted(range(gradient.dim()), key=gradient.stride, reverse=True))
