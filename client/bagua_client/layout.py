"""How a list of tensors is cut into buckets: a pure function with the same result on every rank."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from bagua_client.configuration import Configuration
from bagua_wire.cutting import Cutter, Cutting


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the other ranks and the service see it.

    Attributes:
        name: its name in the model.
        shape: its sizes.
        element_bytes: bytes of one element.
        dtype: torch's name of the dtype, such as ``torch.float32``.
        device: device type and the device's position in this rank's model, such as ``cuda#0``;
            equal on all ranks, although the ranks use different devices.
        is_sparse: whether torch expects sparse gradients.
        family: only tensors of the same family may share a bucket.
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    dtype: str
    device: str
    is_sparse: bool = False
    family: str = ""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes

    @property
    def group(self) -> str:
        """Dtype, device and family; only tensors of the same group may share a bucket. A sparse
        gradient has a bucket of its own."""
        family = self.name if self.is_sparse else self.family
        return f"{self.dtype}/{self.device}" + (f"/{family}" if family else "")


def describe(
    named_tensors: Sequence[tuple[str, torch.Tensor]], sparse: Sequence[bool] = ()
) -> tuple[TensorSpec, ...]:
    """The specs of a model's tensors, in the order given.

    Args:
        sparse: of each, whether torch expects sparse gradients; empty: of none.
    """
    devices: dict[torch.device, int] = {}
    specs = []
    kinds = sparse or [False] * len(named_tensors)
    for (name, tensor), is_sparse in zip(named_tensors, kinds, strict=True):
        position = devices.setdefault(tensor.device, len(devices))
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                element_bytes=tensor.element_size(),
                dtype=str(tensor.dtype),
                device=f"{tensor.device.type}#{position}",
                is_sparse=is_sparse,
            )
        )
    return tuple(specs)


Partition = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """A tensor list cut under a configuration.

    Attributes:
        configuration: what it was cut for.
        partition: for each bucket the indices of its tensors, in the order in which they
            become ready.
        digest: a 63-bit hash of tensors, order, configuration and partition. Two ranks have the
            same digest if and only if these are equal on both, hash collisions aside.
    """

    configuration: Configuration
    partition: Partition
    digest: int


def cut(
    tensors: Sequence[TensorSpec], order: Sequence[int], configuration: Configuration
) -> Partition:
    """Cut ``order`` (indices of ``tensors``) by the rule of :mod:`bagua_wire.cutting`.

    The buckets are sorted by when their last tensor becomes ready, which is the order in which they
    can start.

    Raises:
        ValueError: the explicit buckets do not add up to the number of tensors, or mix groups.
    """
    ready = [tensors[index] for index in order]
    buckets = Cutter(ready).cut(Cutting.of(configuration.values))
    for number, bucket in enumerate(buckets if configuration.buckets else ()):
        groups = sorted({ready[place].group for place in bucket.positions})
        if len(groups) > 1:
            raise ValueError(
                f"explicit bucket {number} mixes tensors of {' and '.join(groups)}, which cannot "
                "travel in one message"
            )
    return tuple(tuple(order[place] for place in bucket.positions) for bucket in buckets)


def plan(
    tensors: Sequence[TensorSpec], order: Sequence[int], configuration: Configuration
) -> Layout:
    """The layout of ``tensors`` under ``configuration``.

    Raises:
        ValueError: its explicit buckets do not fit the tensors.
    """
    partition = cut(tensors, order, configuration)
    return Layout(
        configuration=configuration,
        partition=partition,
        digest=digest_of(_digest_of(tuple(tensors)), configuration.to_json(), partition),
    )


@lru_cache(maxsize=8)
def _digest_of(tensors: tuple[TensorSpec, ...]) -> int:
    """Digest of a model's tensors. It is cached because every change of configuration needs it, on
    the training thread."""
    return digest_of([[spec.name, spec.shape, spec.group] for spec in tensors])


def digest_of(*values: object) -> int:
    """A 63-bit digest of JSON values, not negative, so that it fits in an int64 tensor."""
    text = json.dumps(values, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
