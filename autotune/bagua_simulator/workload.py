"""The computing times of a training step, and when its gradients become ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bagua_wire.cutting import Tensor

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Workload:
    """A model's gradients and the time it takes to compute them.

    Attributes:
        tensors: in gradient-ready order.
        forward_seconds: from the end of the step before to the beginning of the backward pass.
        ready_seconds: of each tensor, since the beginning of the backward pass, without
            communication; ascending. The last one is the length of the backward pass.
    """

    name: str
    tensors: tuple[Tensor, ...]
    forward_seconds: float
    ready_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError(f"workload {self.name} has no tensors")
        if len(self.tensors) != len(self.ready_seconds):
            raise ValueError(
                f"workload {self.name} has {len(self.tensors)} tensors and "
                f"{len(self.ready_seconds)} ready_seconds"
            )
        if not all(0 <= value < math.inf for value in (self.forward_seconds, *self.ready_seconds)):
            raise ValueError(f"workload {self.name}: a time is negative or not finite")
        if any(later < earlier for earlier, later in pairwise(self.ready_seconds)):
            raise ValueError(f"workload {self.name}: ready_seconds must ascend")

    @property
    def compute_seconds(self) -> float:
        """The length of a step without communication."""
        return self.forward_seconds + self.ready_seconds[-1]

    def recomputing(self, seconds: Sequence[float]) -> Workload:
        """The workload of a model that recomputes its activations.

        Args:
            seconds: that each of its blocks recomputes, in the order of the model. The blocks are
                taken to share the backward pass equally, and each recomputes when its turn comes.
        """
        length, count = self.ready_seconds[-1], len(seconds)
        begins = [(place / count * length, each) for place, each in enumerate(reversed(seconds))]
        delayed = tuple(
            ready + sum(each for begin, each in begins if begin < ready)
            for ready in self.ready_seconds
        )
        return replace(self, ready_seconds=delayed)


@dataclass(frozen=True)
class Layer:
    """A layer in forward order: its parameters by name, and its floating point operations.

    ``operations`` counts those of the forward pass of one sample, a multiplication and an
    addition as two.
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    operations: float


@dataclass(frozen=True)
class Architecture:
    """A published model: its layers in forward order, and how long it computes.

    Attributes:
        compute_seconds: of a whole step on one device, without communication.
        late: parameters that are ready only at the very end: those used again by the first layer.
    """

    name: str
    layers: tuple[Layer, ...]
    compute_seconds: float
    late: tuple[str, ...] = ()

    def workload(self) -> Workload:
        """The workload of its float32 gradients.

        The backward pass computes two products where the forward pass computes one, so it takes
        two thirds of ``compute_seconds``; a layer's share is its share of the operations, and
        its parameters become ready when it is done.
        """
        backward_seconds = self.compute_seconds * 2 / 3
        total = sum(layer.operations for layer in self.layers)
        tensors: list[tuple[Tensor, float]] = []
        done = 0.0
        for layer in reversed(self.layers):
            done += layer.operations
            for parameter, shape in reversed(layer.parameters):
                seconds = backward_seconds * (1.0 if parameter in self.late else done / total)
                tensors.append((_tensor(parameter, shape), min(seconds, backward_seconds)))
        tensors.sort(key=lambda entry: entry[1])
        return Workload(
            name=self.name,
            tensors=tuple(tensor for tensor, _ in tensors),
            forward_seconds=self.compute_seconds - backward_seconds,
            ready_seconds=tuple(seconds for _, seconds in tensors),
        )


def _tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    elements = math.prod(shape)
    return Tensor(
        name=name,
        elements=elements,
        bytes=elements * FLOAT_BYTES,
        dtype="torch.float32",
        group="torch.float32/cuda#0",
    )
