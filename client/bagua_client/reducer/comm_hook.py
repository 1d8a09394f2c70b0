"""How a bucket travels: torch's reducer hands over its buffer and waits for a future."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import AllReduce
from bagua_client.communication.pipeline import Arrival, Pipeline, pipeline_for
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket, Hook

Mark = Callable[[], None]
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_PART_BYTES = 512 * 1024
"""A bucket is divided into no smaller ones: each costs a latency."""
ALIGNED_ELEMENTS = 16
"""At whose multiples a part begins: NCCL copies by 16 bytes."""


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
        self._turn = 0
        # One for each channel: a chain waits for no chain of another channel.
        self._pipelines: dict[tuple[torch.device, int], Pipeline] = {}

    def __call__(self, state: object, bucket: GradBucket) -> Arrival:
        on_end = self._watcher.bucket_starts(bucket)
        if bucket.index() == 0:
            self._turn = 0
        flat = bucket.buffer()
        if flat.layout is not torch.strided or not self._algorithm.carries(flat):
            # Of a sparse gradient nothing but one whole sum is known.
            operations = (AllReduce(self._communicator.group),)
            return self._pipeline(flat.device, 0).start(flat.mul_(self._scale), operations, on_end)
        wire = self._onto_wire(flat)
        self._algorithm.departs(bucket, wire)
        arrival = self._carry(wire, on_end)
        if wire is flat:
            return arrival
        return arrival.then(lambda done: flat.copy_(done.value()[: flat.numel()]))

    def _onto_wire(self, flat: torch.Tensor) -> torch.Tensor:
        """What travels: the bucket itself where it can, scaled; else a copy that was scaled and
        cast in one pass. Scaled before: a sum of 16 bits overflows soon."""
        dtype = WIRE_DTYPES.get(self.configuration.wire_precision, flat.dtype)
        if not flat.is_floating_point() or flat.itemsize <= dtype.itemsize:
            dtype = flat.dtype
        missing = -flat.numel() % self._multiple
        scale = 1.0 if self._algorithm.scales_itself else self._scale
        if not missing and dtype == flat.dtype:
            return flat if scale == 1.0 else flat.mul_(scale)
        wire = torch.empty(flat.numel() + missing, dtype=dtype, device=flat.device)
        wire[flat.numel() :] = 0
        torch.mul(flat, scale, out=wire[: flat.numel()])
        return wire

    def _carry(self, wire: torch.Tensor, on_end: Mark | None) -> Arrival:
        """In parts that travel at once, each on the next channel; a small bucket in one."""
        arrivals = []
        parts = self._parts(wire)
        for part in parts:
            channel = self._turn % self.configuration.channels
            self._turn += 1
            chain = self._algorithm.operations(self._communicator, self.configuration, channel)
            pipeline = self._pipeline(wire.device, channel)
            arrivals.append(pipeline.start(part, chain, on_end if len(parts) == 1 else None))
        return arrivals[0] if len(parts) == 1 else pipeline.gather(wire, arrivals, on_end)

    def _parts(self, wire: torch.Tensor) -> Sequence[torch.Tensor]:
        most = min(self.configuration.channels, wire.nbytes // SMALLEST_PART_BYTES)
        if most <= 1:
            return (wire,)
        unit = self._multiple * ALIGNED_ELEMENTS
        return torch.split(wire, math.ceil(wire.numel() / most / unit) * unit)

    @property
    def _multiple(self) -> int:
        """The number that the elements of what travels divide by."""
        return math.lcm(
            self._communicator.padding_multiple(self.configuration),
            self._algorithm.multiple(self._communicator, self.configuration),
        )

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
