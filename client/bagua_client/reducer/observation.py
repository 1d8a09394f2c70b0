"""What is seen of a model's steps on one rank; all of it is called by way of the observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from bagua_client.reducer.comm_hook import Mark
from bagua_client.reducer.ready_order import ReadyOrder
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import GradBucket
from bagua_client.tunable.observers import Observers
from bagua_client.tunable.timeline import Timeline


class Observation:
    """What is seen of one model's steps.

    Args:
        parameters: the model's, in the reducer's order.
        ddp: the wrapper.

    Attributes:
        order: in which gradients become ready.
        on_last_ready: called when a step's last bucket is full on this rank.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ddp: DistributedDataParallel,
        observers: Observers,
    ) -> None:
        self.order = ReadyOrder(parameters, ddp, observers)
        self.on_last_ready: Callable[[], None] | None = None
        self._parameters = parameters
        self._observers = observers
        self._timeline: Timeline | None = None
        self._ready_handles: list[RemovableHandle] = []

    def record(self, timeline: Timeline | None) -> None:
        """Record the next steps in ``timeline``; None: stop recording."""
        self._timeline = timeline
        torchs.remove(self._ready_handles)
        if timeline is not None:
            call, ready = self._observers.call, timeline.tensor_ready
            self._ready_handles = torchs.on_each_gradient(
                self._parameters, lambda index: call(ready, index)
            )

    def bucket_starts(self, bucket: GradBucket) -> Mark | None:
        """A bucket is full on this rank and about to travel. Called in the backward pass. Returns
        what to call when it has arrived, if anything."""
        self.order.saw(bucket)
        on_end = None
        if self._timeline is not None:
            arrived = self._timeline.bucket_starts(torchs.bytes_of(bucket))
            on_end = partial(self._observers.call, arrived)
        if bucket.is_last():
            self.last_is_ready()
        return on_end

    def last_is_ready(self) -> None:
        """All gradients of a step are there on this rank."""
        if self.on_last_ready is not None:
            self.on_last_ready()

    def close(self) -> None:
        """Observe nothing but the order."""
        self.on_last_ready = None
        self.record(None)
