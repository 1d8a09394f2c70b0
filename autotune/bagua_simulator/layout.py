"""How a configuration cuts a workload's gradients into buckets: exactly by the service's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Cutter, Cutting, Tensor
from bagua_wire.knobs import BUCKET_KNOB, DEFAULT_BUCKET_BYTES, EDGE_KNOBS


@dataclass(frozen=True)
class Bucket:
    """Tensors of one group that travel together; full when its ``last`` tensor is ready.

    Attributes:
        bytes: of its tensors.
        last: the index, in gradient-ready order, of the tensor that completes it.
        dtype: of its tensors.
    """

    bytes: int
    last: int
    dtype: str


class Layouts:
    """Cuts one list of tensors, in gradient-ready order, into buckets."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._cutter = Cutter(tensors)

    def cut(self, configuration: Mapping[str, Value]) -> list[Bucket]:
        """The buckets in the order in which they become full.

        Knobs missing in ``configuration`` are not in use.

        Raises:
            ValueError: a size is not valid, or ``buckets`` does not fit the tensors.
        """
        given = {BUCKET_KNOB: DEFAULT_BUCKET_BYTES, **configuration}
        for knob in (BUCKET_KNOB, *EDGE_KNOBS):
            value = given.get(knob, 0)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{knob} is {value!r}; it must be a number of bytes")
        found = []
        for bucket in self._cutter.cut(Cutting.of(Configuration(given))):
            if len({self._tensors[position].group for position in bucket.positions}) > 1:
                start = bucket.positions[0]
                raise ValueError(f"buckets: the one that begins with tensor {start} mixes groups")
            found.append(Bucket(bucket.bytes, bucket.last, self._tensors[bucket.last].dtype))
        return found
