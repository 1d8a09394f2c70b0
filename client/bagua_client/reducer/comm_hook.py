"""How a bucket travels: torch's reducer hands over its buffer and waits for a future."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import AllReduce
from bagua_client.communication.pipeline import Arrival, Pipeline, pipeline_for
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket, Hook

Mark = Callable[[], None]


class Watcher(Protocol):
    """Who is told of the buckets of a step."""

    def bucket_starts(self, bucket: GradBucket) -> Mark | None:
        """The bucket is about to travel; answers with what to call at its end, if anything."""


class Travel:
    """The communication hook that carries out a configuration.

    It holds nothing that holds the reducer, which holds it: a circle through C++ would never be
    freed.

    Attributes:
        configuration: how buckets travel; changed between two steps only, on all ranks.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        communicator: Communicator,
        configuration: Configuration,
        watcher: Watcher,
    ) -> None:
        self.configuration = configuration
        self._algorithm = algorithm
        self._communicator = communicator
        self._watcher = watcher
        self._scale = algorithm.scale(communicator.world_size)
        # One for each channel: a chain waits for no chain of another channel.
        self._pipelines: dict[tuple[torch.device, int], Pipeline] = {}

    def __call__(self, state: object, bucket: GradBucket) -> Arrival:
        on_end = self._watcher.bucket_starts(bucket)
        flat = bucket.buffer()
        if self._scale != 1.0:
            flat.mul_(self._scale)
        if flat.layout is not torch.strided:
            # A sparse gradient: nothing but one whole sum is known for it.
            operations = (AllReduce(self._communicator.group),)
            return self._pipeline(flat.device, 0).start(flat, operations, on_end)
        channel = bucket.index() % self.configuration.channels
        pipeline = self._pipeline(flat.device, channel)
        chain = self._algorithm.operations(self._communicator, self.configuration, channel)
        multiple_of = self._communicator.padding_multiple(self.configuration)
        missing = -flat.numel() % multiple_of
        if not missing:
            return pipeline.start(flat, chain, on_end)
        padded = torch.nn.functional.pad(flat, (0, missing))
        return pipeline.start(padded, chain, on_end).then(lambda done: _unpad(done, flat))

    def close(self) -> None:
        """Let go of threads; those that are still needed come back with the first chain."""
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()

    def _pipeline(self, device: torch.device, channel: int) -> Pipeline:
        key = device, channel
        if key not in self._pipelines:
            self._pipelines[key] = pipeline_for(device)
        return self._pipelines[key]


def _unpad(done: Arrival, flat: torch.Tensor) -> torch.Tensor:
    return flat.copy_(done.value()[: flat.numel()])


def watched(hook: Hook, state: object, watcher: Watcher) -> Hook:
    """The user's ``hook`` as it is, with its buckets told to ``watcher``."""

    def run(_: object, bucket: GradBucket) -> Arrival:
        on_end = watcher.bucket_starts(bucket)
        arrival = hook(state, bucket)
        if on_end is not None:
            arrival.add_done_callback(lambda _: on_end())
        return arrival

    return run


STATELESS = (
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
)


def survives_recut(hook: Hook) -> bool:
    """Whether ``hook`` remembers nothing of its buckets, so that they may be cut anew.

    Known of torch's plain hooks; another one says so by an attribute ``survives_recut = True``.
    A wrapper of torch's may hold any hook.
    """
    if getattr(hook, "survives_recut", False):
        return True
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return module in STATELESS and "_wrapper" not in name


def keeps_state(hook: Hook) -> bool:
    """Whether ``hook`` is known to fail when buckets change: torch's PowerSGD keeps an error for
    each. Of one that is not known at all only a tuning keeps away; by hand its user may try."""
    return getattr(hook, "__module__", "").endswith(".powerSGD_hook")
