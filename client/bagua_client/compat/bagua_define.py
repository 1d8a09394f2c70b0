"""What Bagua's workers and its service tell each other."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict


class TensorDtype(str, enum.Enum):
    """Types of a tensor's elements, by their names in the protocol."""

    F32 = "f32"
    F16 = "f16"
    U8 = "u8"
    I64 = "i64"


class TensorDeclaration(TypedDict):
    """A tensor as the service knows it; ``dtype`` is a :class:`TensorDtype` or its value."""

    name: str
    num_elements: int
    dtype: str


class BaguaCoreTelemetrySpan(TypedDict):
    """When a tensor became ready; times in milliseconds."""

    trace_id: int
    action: str
    tensor_name: str
    start_time: int
    end_time: int


_ELEMENT_BYTES = {
    TensorDtype.F32: 4,
    TensorDtype.F16: 2,
    TensorDtype.U8: 1,
    TensorDtype.I64: 8,
}


def get_tensor_declaration_bytes(td: TensorDeclaration) -> int:
    """The tensor's size."""
    return td["num_elements"] * _ELEMENT_BYTES[TensorDtype(td["dtype"])]


@dataclass
class BaguaHyperparameter:
    """What the service recommends.

    Attributes:
        buckets: the tensors of each.
        bucket_size: in bytes, of which they were cut.
        is_hierarchical_reduce: whether ranks reduce inside their nodes first.
    """

    buckets: list[list[TensorDeclaration]] = field(default_factory=list)
    bucket_size: int = 0
    is_hierarchical_reduce: bool = False

    def update(self, param_dict: Mapping[str, Any]) -> BaguaHyperparameter:
        """Take over what has a name of ours, and leave out the rest; returns itself."""
        for name in self.dict().keys() & param_dict.keys():
            setattr(self, name, param_dict[name])
        return self

    def dict(self) -> dict[str, Any]:
        """The values as they are sent."""
        return asdict(self)
