"""How a tensor list is cut into buckets: a pure function, the same on every rank."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from bagua_client.configuration import Configuration


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as the other ranks and the service see it.

    Attributes:
        name: its name in the model.
        shape: its sizes.
        element_bytes: bytes of one element.
        dtype: torch's name of the dtype, such as ``torch.float32``.
        device: device type and the position of the device in this rank's model, such as
            ``cuda#0``: equal on all ranks, although the ranks use different devices.
    """

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    dtype: str
    device: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes

    @property
    def group(self) -> str:
        """Only tensors of one group may share a bucket."""
        return f"{self.dtype}/{self.device}"


def describe(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[TensorSpec, ...]:
    """The specs of a model's tensors, in the order given."""
    devices: dict[torch.device, int] = {}
    specs = []
    for name, tensor in named_tensors:
        position = devices.setdefault(tensor.device, len(devices))
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                element_bytes=tensor.element_size(),
                dtype=str(tensor.dtype),
                device=f"{tensor.device.type}#{position}",
            )
        )
    return tuple(specs)


@dataclass(frozen=True)
class Layout:
    """A tensor list cut under a configuration.

    Attributes:
        configuration: what it was cut for.
        partition: for each bucket the indices of its tensors, in the order in which they
            become ready.
        digest: 63 bits that are equal on two ranks if and only if (but for a hash collision)
            tensors, order, configuration and partition are.
    """

    configuration: Configuration
    partition: tuple[tuple[int, ...], ...]
    digest: int


def cut(
    tensors: Sequence[TensorSpec], order: Sequence[int], bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Cut ``order`` (indices of ``tensors``) into buckets.

    Each group has one open bucket; it is closed as soon as it holds ``bucket_bytes``, which
    is DistributedDataParallel's rule too. Buckets stand in the order in which their last
    tensor becomes ready, which is the order in which they can start.
    """
    opened: dict[str, list[int]] = {}
    held_bytes: dict[str, int] = {}
    position = {index: place for place, index in enumerate(order)}
    buckets: list[list[int]] = []
    for index in order:
        tensor = tensors[index]
        bucket = opened.setdefault(tensor.group, [])
        bucket.append(index)
        held_bytes[tensor.group] = held_bytes.get(tensor.group, 0) + tensor.bytes
        if held_bytes[tensor.group] >= bucket_bytes:
            buckets.append(opened.pop(tensor.group))
            held_bytes[tensor.group] = 0
    buckets.extend(opened.values())
    buckets.sort(key=lambda bucket: position[bucket[-1]])
    return tuple(tuple(bucket) for bucket in buckets)


def plan(
    tensors: Sequence[TensorSpec], order: Sequence[int], configuration: Configuration
) -> Layout:
    """The layout of ``tensors`` under ``configuration``."""
    partition = cut(tensors, order, configuration.bucket_bytes)
    return Layout(
        configuration=configuration,
        partition=partition,
        digest=digest_of(_digest_of(tuple(tensors)), configuration.to_json(), partition),
    )


@lru_cache(maxsize=8)
def _digest_of(tensors: tuple[TensorSpec, ...]) -> int:
    """Made once for a model: every change of configuration needs it on the training thread."""
    return digest_of([[spec.name, spec.shape, spec.group] for spec in tensors])


def digest_of(*values: object) -> int:
    """A positive 63-bit digest of JSON values, fit for an int64 tensor."""
    text = json.dumps(values, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
