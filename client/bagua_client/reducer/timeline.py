"""When, in one step, each tensor became ready, and each bucket was sent and arrived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Timeline:
    """The record of one step; a step without one costs nothing.

    Args:
        mark: a mark of now: the time on the CPU, or an event in the current stream.

    Attributes:
        ready: the mark of each tensor, by its index in the model.
        bucket_bytes: of each bucket, in the order in which they began to travel.
        started: the mark of each bucket, in that order.
        ended: by the bucket's place in that order; marks come from any thread.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.ready: dict[int, Any] = {}
        self.bucket_bytes: list[int] = []
        self.started: list[Any] = []
        self.ended: dict[int, Any] = {}

    def tensor_ready(self, index: int) -> None:
        """The tensor is final for this step."""
        self.ready[index] = self._mark()

    def bucket_starts(self, size_bytes: int) -> Callable[[], None]:
        """The next bucket is about to travel; answers with what to call when it has arrived."""
        self.bucket_bytes.append(size_bytes)
        self.started.append(self._mark())
        return partial(self._bucket_ends, len(self.started) - 1)

    def _bucket_ends(self, place: int) -> None:
        self.ended[place] = self._mark()
