"""Interludes: what takes place between two steps and is no part of the training: a validation, a
checkpoint.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from bagua_client.algorithms import AsyncModelAverageAlgorithm
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel


class Interlude:
    """An interlude: while it lasts, time is not a step's, and no round of averaging moves the
    weights.

    Args:
        average: where the ranks train apart, make their weights equal first.
    """

    def __init__(self, average: bool) -> None:
        self._average = average
        self._model: DistributedDataParallel | None = None
        self._unmeasured: AbstractContextManager[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._model is not None

    def begin(self, model: DistributedDataParallel) -> None:
        """Begin, on all ranks after the same step; nothing happens if it has begun."""
        if self._model is not None:
            return
        self._model = model
        unmeasured: AbstractContextManager[None] = model.unmeasured()
        unmeasured.__enter__()
        self._unmeasured = unmeasured
        if isinstance(model.algorithm, AsyncModelAverageAlgorithm):
            model.algorithm.abort(model, average=self._average)

    def end(self) -> None:
        """The next step begins; nothing happens if it is not on."""
        model = self._model
        self.forget()
        if model is not None and isinstance(model.algorithm, AsyncModelAverageAlgorithm):
            model.algorithm.resume(model)

    def forget(self) -> None:
        """Forget the interlude: no step follows. Waits for no other rank."""
        if self._unmeasured is not None:
            self._unmeasured.__exit__(None, None, None)
        self._model = self._unmeasured = None
