"""Carries buckets: a communication hook, to which torch's reducer passes one bucket after another,
sends each as a flat tensor over the channels; a large one in parts that travel at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import AllReduce
from bagua_client.communication.pipeline import Arrival, Pipeline, arrived, pipeline_for
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket, Hook

SMALLEST_PART_BYTES = 512 * 1024
"""The smallest part that a tensor is split into: each part adds the latency of a message."""
ALIGNED_ELEMENTS = 16
"""Number of elements at whose multiples each part begins: NCCL copies 16 bytes at a time."""


class Carrier:
    """Runs one algorithm's chains of operations. All ranks must pass tensors in the same order."""

    def __init__(self, algorithm: Algorithm, communicator: Communicator) -> None:
        self._algorithm = algorithm
        self._communicator = communicator
        self._turn = 0
        # One pipeline for each channel: a chain never waits for a chain of another channel.
        self._pipelines: dict[tuple[torch.device, int], Pipeline] = {}

    def multiple(self, configuration: Configuration) -> int:
        """The number that must divide the element count of each tensor that travels."""
        return math.lcm(
            self._communicator.padding_multiple(configuration),
            self._algorithm.multiple(self._communicator, configuration),
        )

    def begin_step(self) -> None:
        """Begin a step: the next part travels on the first channel."""
        self._turn = 0

    def carry(
        self,
        flat: torch.Tensor,
        configuration: Configuration,
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        """Start the algorithm's chain on ``flat``: a small tensor whole, a large one in parts.

        Each part travels on the next channel. ``on_end`` is called when all parts have arrived.
        """
        arrivals = []
        parts = self._parts(flat, configuration)
        for part in parts:
            channel = self._turn % configuration.channels
            self._turn += 1
            chain = self._algorithm.operations(self._communicator, configuration, channel)
            pipeline = self._pipeline(flat.device, channel)
            arrivals.append(pipeline.start(part, chain, on_end if len(parts) == 1 else None))
        return arrivals[0] if len(parts) == 1 else pipeline.gather(flat, arrivals, on_end)

    def sum_up(self, flat: torch.Tensor, on_end: Callable[[], None] | None = None) -> Arrival:
        """All-reduce ``flat`` as a whole, whatever the configuration and the algorithm."""
        operations = (AllReduce(self._communicator.everyone),)
        return self._pipeline(flat.device, 0).start(flat, operations, on_end)

    def close(self) -> None:
        """Release threads and CUDA streams; the next chain that needs them makes new ones."""
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()

    def _parts(self, flat: torch.Tensor, configuration: Configuration) -> Sequence[torch.Tensor]:
        most = min(configuration.channels, flat.nbytes // SMALLEST_PART_BYTES)
        if most <= 1 or self._algorithm.travels_whole:
            return (flat,)
        unit = self.multiple(configuration) * ALIGNED_ELEMENTS
        return torch.split(flat, math.ceil(flat.numel() / most / unit) * unit)

    def _pipeline(self, device: torch.device, channel: int) -> Pipeline:
        key = device, channel
        if key not in self._pipelines:
            self._pipelines[key] = pipeline_for(device)
        return self._pipelines[key]


Mark = Callable[[], None]
WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Watcher(Protocol):
    """Observes the buckets of a step."""

    def bucket_starts(self, bucket: GradBucket) -> Mark | None:
        """A bucket is about to travel. Returns the function to call when it has arrived, if any."""


class Travel:
    """The communication hook that carries out a configuration.

    It holds no reference to the reducer, which holds it: Python cannot free a reference cycle
    through C++.

    Attributes:
        configuration: how buckets travel. It may change only between two steps, on all ranks.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        communicator: Communicator,
        configuration: Configuration,
        watcher: Watcher,
    ) -> None:
        self.configuration = configuration
        self._communicator = communicator
        self._watcher = watcher
        self._begin(algorithm)

    def use(self, algorithm: Algorithm) -> None:
        """Run the chains of ``algorithm`` from the next step on."""
        self.close()
        self._begin(algorithm)

    def _begin(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._carrier = Carrier(algorithm, self._communicator)
        self._scale = algorithm.scale(self._communicator.world_size)

    def __call__(self, state: object, bucket: GradBucket) -> Arrival:
        on_end = self._watcher.bucket_starts(bucket)
        if bucket.index() == 0:
            self._carrier.begin_step()
            self._algorithm.reduction_begins()
        flat = bucket.buffer()
        if self._algorithm.leaves_gradients:
            self._algorithm.departs(bucket, flat)
            if on_end is not None:
                on_end()
            return arrived(flat)
        if flat.layout is not torch.strided or not self._algorithm.carries(flat):
            # A sparse gradient can only be summed as a whole; the algorithm never sees it.
            if flat.layout is torch.strided:
                self._algorithm.departs(bucket, flat)
            return self._carrier.sum_up(flat.mul_(self._scale), on_end)
        wire = self._onto_wire(flat)
        self._algorithm.departs(bucket, wire)
        arrival = self._carrier.carry(wire, self.configuration, on_end)
        if wire is flat:
            return arrival
        return arrival.then(lambda done: flat.copy_(done.value()[: flat.numel()]))

    def _onto_wire(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the tensor to send: ``flat`` itself if it needs no padding and no cast, else a
        copy. It is scaled first, unless the algorithm scales by itself: a sum of unscaled 16-bit
        numbers soon overflows. A copy is scaled and cast in one pass."""
        dtype = WIRE_DTYPES.get(self.configuration.wire_precision, flat.dtype)
        if not flat.is_floating_point() or flat.itemsize <= dtype.itemsize:
            dtype = flat.dtype
        missing = -flat.numel() % self._carrier.multiple(self.configuration)
        scale = 1.0 if self._algorithm.scales_itself else self._scale
        if not missing and dtype == flat.dtype:
            return flat if scale == 1.0 else flat.mul_(scale)
        wire = torch.empty(flat.numel() + missing, dtype=dtype, device=flat.device)
        wire[flat.numel() :] = 0
        torch.mul(flat, scale, out=wire[: flat.numel()])
        return wire

    def close(self) -> None:
        """Release threads and CUDA streams; the next chain that needs them makes new ones."""
        self._carrier.close()


def watched(hook: Hook, state: object, watcher: Watcher) -> Hook:
    """Wrap the user's ``hook``: it runs unchanged, and ``watcher`` is told of its buckets."""

    def run(_: object, bucket: GradBucket) -> Arrival:
        on_end = watcher.bucket_starts(bucket)
        arrival = hook(state, bucket)
        if on_end is not None:
            arrival.add_done_callback(lambda _: on_end())
        return arrival

    return run


STATELESS = (
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks",
)


def survives_recut(hook: Hook) -> bool:
    """Whether ``hook`` keeps no state for its buckets, so that they may be re-cut.

    True for torch's stateless hooks, and for any hook with an attribute ``survives_recut = True``.
    Torch's wrapper hooks do not count as stateless, because they may wrap any hook.
    """
    if getattr(hook, "survives_recut", False):
        return True
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return module in STATELESS and "_wrapper" not in name


def why_not_recut(hook: Hook) -> str:
    """Why ``hook`` is known to fail when buckets change; empty: it is not.

    Buckets of an unknown hook are never tuned, but its user may re-cut them by hand.
    """
    module = getattr(hook, "__module__", "")
    if module.endswith(".powerSGD_hook"):
        return "it keeps an error for each bucket"
    if module.endswith(".mixed_precision_hooks"):
        # Measured with torch 2.11: set_mixed_precision_param_dtype leaves the views of the first
        # buckets on memory that is not reduced.
        return "under mixed_precision torch's gradients are wrong in the first pass of a reducer"
    return ""
