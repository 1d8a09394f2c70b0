"""When each tensor of a step became ready, and when each bucket was sent and arrived; of a sharded
model also when the parameters of each unit were gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass
class Gathered:
    """Marks of when the parameters of a unit were gathered.

    Attributes:
        index: of the unit's tensor in the model; of several that travel as one, the first one's.
        size_bytes: of all of it, on every rank.
        ended: None: it is not there yet.
    """

    index: int
    size_bytes: int
    started: Any
    ended: Any = None


class Timeline:
    """The record of one step. A step that is not recorded has no overhead.

    Args:
        mark: returns a mark of the current moment: the CPU's time, or an event in the current CUDA
            stream.

    Attributes:
        ready: when each tensor became ready, by its index in the model.
        bucket_bytes: size of each bucket, in the order in which the buckets began to travel.
        started: when each bucket began to travel, in that order.
        ended: when each bucket arrived, by its place in that order; written by any thread.
        gathers: in the order in which they began.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.ready: dict[int, Any] = {}
        self.bucket_bytes: list[int] = []
        self.started: list[Any] = []
        self.ended: dict[int, Any] = {}
        self.gathers: list[Gathered] = []

    def tensor_ready(self, index: int) -> None:
        """The tensor has its final value for this step."""
        self.ready[index] = self._mark()

    def bucket_starts(self, size_bytes: int) -> Callable[[], None]:
        """The next bucket is about to travel. Returns the function to call when it has arrived."""
        self.bucket_bytes.append(size_bytes)
        self.started.append(self._mark())
        return partial(self._bucket_ends, len(self.started) - 1)

    def _bucket_ends(self, place: int) -> None:
        self.ended[place] = self._mark()

    def gather_starts(self, index: int, size_bytes: int) -> Callable[[], None]:
        """A unit is about to be gathered. Returns the function to call when it is there."""
        gathered = Gathered(index, size_bytes, self._mark())
        self.gathers.append(gathered)

        def ends() -> None:
            gathered.ended = self._mark()

        return ends
