"""When each tensor of one step became ready, when each bucket began to travel and arrived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class Timeline:
    """The record of one step; a step without one costs nothing.

    Args:
        mark: a mark of now: the time on the CPU, or an event in the current stream.
        tensors: how many the model has.
        most_marks: where they are more, only some are marked, evenly chosen and the last one
            always; buckets are not marked as they begin then, which is when a tensor is ready.

    Attributes:
        order: the tensors as they became ready, by their index in the model.
        ready: by the place in ``order``, the marks.
        started: the mark of each bucket, in the order of the layout; None: not marked.
        ended: by the bucket's place in that order, the marks; they come from any thread.
    """

    def __init__(self, mark: Callable[[], Any], tensors: int, most_marks: int) -> None:
        self._mark = mark
        self._last = tensors - 1
        self._stride = -(-tensors // most_marks)
        self.order: list[int] = []
        self.ready: dict[int, Any] = {}
        self.started: list[Any] = []
        self.ended: dict[int, Any] = {}

    def tensor_ready(self, index: int) -> None:
        """The tensor is final for this step."""
        place = len(self.order)
        self.order.append(index)
        if place % self._stride == 0 or place == self._last:
            self.ready[place] = self._mark()

    def bucket_starts(self) -> Callable[[], None]:
        """The next bucket is handed to its process group; answers with what to call at its end."""
        self.started.append(self._mark() if self._stride == 1 else None)
        return partial(self._bucket_ends, len(self.started) - 1)

    def _bucket_ends(self, place: int) -> None:
        self.ended[place] = self._mark()
