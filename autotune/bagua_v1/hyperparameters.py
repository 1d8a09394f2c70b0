"""Converts between Bagua's hyperparameters and this service's configurations.

Bagua's ``BaguaHyperparameter`` is ``{buckets, bucket_size, is_hierarchical_reduce}``: unlike a
v2 configuration it carries the buckets themselves, cut here from the execution order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bagua_autotune.model.knobs import Categorical, LogInteger, Space
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Cutter, Cutting, Tensor

# Bagua's own service lacks i64, although its worker sends it.
ELEMENT_BYTES = {"f16": 2, "f32": 4, "i64": 8, "u8": 1}

LOWEST_BUCKET_BYTES = 64 * 1024
HIGHEST_BUCKET_BYTES = 1024**3
# A model registered with `whether_to_bucket` false is one bucket per dtype; Bagua expresses that by
# a size larger than any model.  Here the largest size of the knob stands for it.
UNBUCKETED_WIRE_BYTES = 10 * 1024**5
UNBUCKETED_BYTES = 2**53


def tensor(name: str, elements: int, dtype: str) -> Tensor:
    """A tensor of Bagua's; only tensors of one dtype share a bucket."""
    size_bytes = elements * ELEMENT_BYTES[dtype]
    return Tensor(name=name, elements=elements, bytes=size_bytes, dtype=dtype, group=dtype)


def space(default_bucket_bytes: int) -> Space:
    """The knobs that a Bagua worker has; the job's default is always in the domain."""
    return {
        "bucket_bytes": LogInteger(
            low=min(LOWEST_BUCKET_BYTES, default_bucket_bytes),
            high=max(HIGHEST_BUCKET_BYTES, default_bucket_bytes),
        ),
        "hierarchical": Categorical(values=("off", "leaders")),
    }


def baseline(default_bucket_bytes: int) -> Configuration:
    return Configuration(bucket_bytes=default_bucket_bytes, hierarchical="off")


def to_configuration(bucket_size: int, is_hierarchical_reduce: bool) -> Configuration:
    """The configuration that a worker says it ran."""
    return Configuration(
        bucket_bytes=UNBUCKETED_BYTES if bucket_size == UNBUCKETED_WIRE_BYTES else bucket_size,
        hierarchical="leaders" if is_hierarchical_reduce else "off",
    )


def in_execution_order(tensors: Iterable[Tensor], order: Sequence[str]) -> list[Tensor]:
    """The tensors in the order of the spans; those not seen yet come first, as in Bagua's sort."""
    position = {name: index for index, name in enumerate(order)}
    return sorted(tensors, key=lambda tensor: position.get(tensor.name, -1))


def to_wire(tensors: Sequence[Tensor], configuration: Mapping[str, Value]) -> dict[str, Any]:
    """``recommended_hyperparameters`` for tensors in execution order."""
    bucket_bytes = Configuration(configuration).number("bucket_bytes")
    cut = Cutter(tensors).cut(Cutting(bucket_bytes))
    buckets = [[tensors[position] for position in bucket.positions] for bucket in cut]
    buckets.sort(key=lambda members: members[0].dtype)  # Bagua's order of dtypes
    return {
        "buckets": [
            [{"name": t.name, "num_elements": t.elements, "dtype": t.dtype} for t in members]
            for members in buckets
        ],
        "bucket_size": UNBUCKETED_WIRE_BYTES if bucket_bytes == UNBUCKETED_BYTES else bucket_bytes,
        "is_hierarchical_reduce": configuration["hierarchical"] != "off",
    }
