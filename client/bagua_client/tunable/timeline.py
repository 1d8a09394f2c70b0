"""When each tensor of a step became ready, and when each bucket was sent and arrived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


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
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.ready: dict[int, Any] = {}
        self.bucket_bytes: list[int] = []
        self.started: list[Any] = []
        self.ended: dict[int, Any] = {}

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
