"""Runs the operations of a module's buckets: in order, beside the training."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from bagua_client.communication.operations import Start
from bagua_client.communication.pipeline import Arrival, Pipeline, pipeline_for


class ReadyBucket(Protocol):
    """Tensors that are communicated together."""

    tensors: list[Any]

    def run(self) -> None:
        """Do the bucket's operations, one after the other."""


class Backend:
    """Starts a bucket when all its tensors are ready and the buckets before it have started.

    So all ranks run the operations of all buckets in one order, one after the other, whatever
    process groups they use. When the last bucket has started, the first one's turn comes again.
    """

    def __init__(self) -> None:
        self._buckets: Sequence[ReadyBucket] = ()
        self._known: set[int] = set()  # Ids of the buckets' tensors, which the buckets hold.
        self._ready: set[int] = set()
        self._next = 0
        self._arrivals: list[Arrival] = []
        self._pipeline: Pipeline | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether it has buckets."""
        return bool(self._buckets)

    def register_ordered_buckets(self, buckets: Sequence[ReadyBucket]) -> None:
        """Replace the buckets by these; what is under way ends first."""
        self.wait_pending_comm_ops()
        self._buckets = list(buckets)
        self._known = {id(tensor) for bucket in buckets for tensor in bucket.tensors}
        self._ready, self._next = set(), 0
        if self._pipeline is not None:
            self._pipeline.close()

    def mark_communication_ready(self, tensor: torch.Tensor) -> None:
        """``tensor`` of one of the buckets is ready.

        Raises:
            ValueError: it is in none of them.
        """
        if id(tensor) not in self._known:
            name = getattr(tensor, "bagua_tensor_name", "")
            raise ValueError(f"tensor {name!r} is ready, but it is in no bucket")
        self._ready.add(id(tensor))
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not self._ready.issuperset(map(id, bucket.tensors)):
                return
            self._start(bucket)
            self._next += 1
        self._ready, self._next = set(), 0

    def wait_pending_comm_ops(self) -> None:
        """Wait for all buckets that have started.

        Raises:
            RuntimeError: what went wrong in an operation.
        """
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.wait()

    def _start(self, bucket: ReadyBucket) -> None:
        flat = bucket.tensors[0].new_empty(0, requires_grad=False)
        if self._pipeline is None:
            self._pipeline = pipeline_for(flat.device)
            weakref.finalize(self, self._pipeline.close)
        # The first does nothing, so that the second runs beside the training thread.
        chain = Start(lambda _: None), Start(lambda _: bucket.run())
        self._arrivals.append(self._pipeline.start(flat, chain))


_backends: weakref.WeakValueDictionary[str, Backend] = weakref.WeakValueDictionary()


def backend_of(model_name: str) -> Backend:
    """The backend of the module with this name; it is there as long as somebody holds it."""
    return _backends.setdefault(model_name, Backend())
