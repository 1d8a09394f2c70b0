"""The reducer: fills buckets as tensors become ready, starts each bucket's chain, waits for all.

The life of a step: every tensor is reported ready once (:meth:`Reducer.ready`), is copied into
its bucket and, when the bucket and all buckets before it are full, travels. The report of the
last tensor waits for all buckets, so the results are in place when ``backward()`` (or the
optimizer's ``step()``) returns. Between two steps the buckets may be cut anew.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bagua_client.algorithms import Algorithm, Communicates, When
from bagua_client.buckets.bucket import Bucket
from bagua_client.buckets.layout import Layout, describe, plan
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.pipeline import Completion, pipeline_for
from bagua_client.configuration import CHANNELS_VALUES, Configuration
from bagua_client.reducer.ready_order import RECORDED_STEPS, ReadyOrder
from bagua_client.reducer.timeline import Timeline

logger = logging.getLogger(__name__)


class Reducer:
    """Communicates the tensors of one model.

    Attributes:
        tensors: specs of the parameters, in the model's order.
        order: the order buckets are cut from: indices of ``tensors``.
        default: the configuration the job starts with, its baseline.
        layout: what is in force.
        recut_seconds: how long the latest re-cut took.
        after_reduction: called at the end of every step's communication, where all ranks are
            known to be in the same step.
        on_last_ready: called when a step's last tensor is ready on this rank, before it travels.
        timeline: where the step under way is recorded; None: it is not.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        algorithm: Algorithm,
        communicator: Communicator,
        configuration: Configuration,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        self.tensors = describe(named_parameters)
        self.order: tuple[int, ...] = tuple(reversed(range(len(named_parameters))))
        self.default = configuration
        self.communicator = communicator
        self.recut_seconds = 0.0
        self.after_reduction: Callable[[], None] | None = None
        self.on_last_ready: Callable[[], None] | None = None
        self.timeline: Timeline | None = None
        self._parameters = [parameter for _, parameter in named_parameters]
        self._algorithm = algorithm
        self._scale = algorithm.scale(communicator.world_size)
        self._gradients = algorithm.communicates is Communicates.GRADIENT
        self._as_view = gradient_as_bucket_view
        self._find_unused = find_unused_parameters and algorithm.when is When.GRADIENT_READY
        # One for each channel: a chain waits for no chain of another channel.
        self._pipelines = {
            (device, channel): pipeline_for(device)
            for device in {p.device for p in self._parameters}
            for channel in range(max(CHANNELS_VALUES))
        }
        for pipeline in self._pipelines.values():
            weakref.finalize(self, pipeline.close)
        self._lock = threading.Lock()
        self._recorder: ReadyOrder | None = ReadyOrder(self.order)
        self._armed = algorithm.when is When.OPTIMIZER_STEPPED
        self._next_layout: Layout | None = None
        self._views: list[torch.Tensor] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._started: list[Completion] = []
        self._unused: list[int] = []
        communicator.prepare(configuration)
        self._cut(self.plan(configuration))
        self._start_step()

    @property
    def order_is_agreed(self) -> bool:
        return self._recorder is None

    @property
    def is_recut_due(self) -> bool:
        """Whether a layout was scheduled that is not in force yet."""
        return self._next_layout is not None

    def plan(self, configuration: Configuration) -> Layout:
        """The buckets this model would have under ``configuration``; changes nothing.

        Raises:
            ValueError: explicit buckets that do not fit the model.
        """
        if configuration.buckets and not self.order_is_agreed:
            raise ValueError(
                "explicit buckets count tensors in the order in which gradients become ready, "
                f"which is known after the first {RECORDED_STEPS} steps"
            )
        return plan(self.tensors, self.order, configuration)

    def schedule(self, layout: Layout) -> None:
        """Cut anew before the next forward pass. All ranks must have agreed on ``layout``, and
        call this in the same step."""
        self.communicator.prepare(layout.configuration)
        self._next_layout = layout

    def before_forward(self) -> None:
        """A training forward pass begins: between two steps.

        Raises:
            RuntimeError: the backward pass before it left parameters without a gradient.
        """
        if self._ready_count:
            raise RuntimeError(self._incomplete_message())
        if self._next_layout is not None:
            self.recut(self._next_layout)

    def arm(self, synchronise: bool) -> None:
        """Whether the backward pass that follows communicates (it does not in ``no_sync``)."""
        if self._algorithm.when is When.GRADIENT_READY:
            self._armed = synchronise

    def recut(self, layout: Layout) -> None:
        """Put ``layout`` into force; gradients that are there stay.

        Raises:
            RuntimeError: tensors are on their way.
        """
        if self._ready_count:
            raise RuntimeError("buckets can only be re-cut between two steps, not in one")
        self._next_layout = None
        if layout.digest == self.layout.digest:
            self.recut_seconds = 0.0
            return
        began = time.perf_counter()
        self._cut(layout)
        self._start_step()
        self.recut_seconds = time.perf_counter() - began
        if self.communicator.rank == 0:
            logger.info(
                "cut %d tensors into %d buckets (%s) in %.1f ms",
                len(self.tensors),
                len(self._buckets),
                layout.configuration,
                self.recut_seconds * 1e3,
            )

    def ready(self, index: int) -> None:
        """The tensor is final for this step."""
        if not self._armed:
            return
        with self._lock:
            if self._is_ready[index]:
                raise RuntimeError(
                    f"parameter {self.tensors[index].name} became ready twice in one backward "
                    f"pass on rank {self.communicator.rank}; a parameter may be used by several "
                    "modules, but not in several reentrant backward passes (use "
                    "torch.utils.checkpoint with use_reentrant=False)"
                )
            if self._find_unused and self._ready_count == 0:
                # The only way to learn that a backward pass has ended without some gradients
                # is the engine's own callback, which has no public name.
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
            if self._recorder is not None:
                self._recorder.record(index)
            self._mark(index)

    def _mark(self, index: int) -> None:
        if self.timeline is not None:
            self.timeline.tensor_ready(index)
        self._is_ready[index] = True
        self._ready_count += 1
        self._collect(index)
        bucket = self._bucket_of[index]
        bucket.missing -= 1
        if not bucket.missing:
            if self.on_last_ready is not None and self._ready_count == len(self.tensors):
                self.on_last_ready()
            self._start_full_buckets()

    def _collect(self, index: int) -> None:
        parameter, view = self._parameters[index], self._views[index]
        if not self._gradients:
            torch.mul(parameter.detach(), self._scale, out=view)
            return
        gradient = parameter.grad
        if gradient is view:
            if self._scale != 1.0:
                view.mul_(self._scale)
        elif gradient is None:
            view.zero_()
        elif gradient.layout is not torch.strided:
            raise RuntimeError(
                f"parameter {self.tensors[index].name} has a sparse gradient, which cannot travel "
                "in a bucket; make it dense (nn.Embedding(sparse=False))"
            )
        else:
            torch.mul(gradient.detach(), self._scale, out=view)
            if self._as_view:
                parameter.grad = view

    def _start_full_buckets(self) -> None:
        while len(self._started) < len(self._buckets):
            bucket = self._buckets[len(self._started)]
            if bucket.missing:
                return
            pipeline = self._pipelines[bucket.flat.device, bucket.channel]
            on_end = None if self.timeline is None else self.timeline.bucket_starts()
            self._started.append(pipeline.start(bucket.flat, bucket.operations, on_end))
        self._finish()

    def _finish(self) -> None:
        for completion in self._started:
            completion.wait()
        # Only now: until then other threads may issue operations on the same group.
        self._deliver(self._share_used() if self._find_unused else None)
        self._start_step()
        if self._algorithm.when is When.GRADIENT_READY:
            # Only a forward pass arms again: a backward pass without one stays local, as in
            # torch's wrapper.
            self._armed = False
        if self._recorder is not None and self._recorder.end_step():
            self.order = self._recorder.agree(self.communicator)
            self._recorder = None
            configuration = (self._next_layout or self.layout).configuration
            self._next_layout = self.plan(configuration)
        if self.after_reduction is not None:
            self.after_reduction()

    def _deliver(self, used: list[bool] | None) -> None:
        if not self._gradients:
            with torch.no_grad():
                for parameter, view in zip(self._parameters, self._views, strict=True):
                    parameter.copy_(view)
            return
        if self._as_view and used is None:
            return
        for index, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            if used is not None and not used[index]:
                continue
            if self._as_view:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.detach().copy_(view)

    def _backward_ended(self) -> None:
        with self._lock:
            if self._ready_count:
                missing = [i for i, ready in enumerate(self._is_ready) if not ready]
                # One with a gradient was used in a pass under no_sync(): that must travel now.
                self._unused = [i for i in missing if self._parameters[i].grad is None]
                for index in missing:
                    self._mark(index)

    def _share_used(self) -> list[bool] | None:
        """For each parameter whether any rank used it; None: this rank used them all."""
        used = torch.ones(len(self.tensors), dtype=torch.int32)
        used[self._unused] = 0
        used = used.to(self.communicator.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.communicator.group)
        return [bool(value) for value in used.tolist()] if self._unused else None

    def _cut(self, layout: Layout) -> None:
        configuration = layout.configuration
        multiple_of = self.communicator.padding_multiple(configuration)
        # Old buckets go before new ones come, but for gradients that live in them: a model that
        # just fits into its device's memory must fit while it is re-cut, too.
        kept = self._gradients_in_buckets()
        self._buckets, self._views, self._bucket_of = [], [], {}
        buckets = []
        views: dict[int, torch.Tensor] = {}
        for place, indices in enumerate(layout.partition):
            parameters = [self._parameters[index] for index in indices]
            bucket = Bucket(indices, parameters, multiple_of, place % configuration.channels)
            bucket.operations = tuple(
                self._algorithm.operations(bucket, self.communicator, configuration)
            )
            buckets.append(bucket)
            for index, view in zip(indices, bucket.views, strict=True):
                views[index] = view
                if index in kept:
                    self._parameters[index].grad = view.copy_(kept.pop(index))
        # Threads that are still needed come back with the first chain.
        for pipeline in self._pipelines.values():
            pipeline.close()
        self.layout, self._buckets = layout, buckets
        self._views = [views[index] for index in range(len(self.tensors))]
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.indices}

    def _gradients_in_buckets(self) -> dict[int, torch.Tensor]:
        """By index, the gradients that are views into the buckets in force."""
        return {
            index: view
            for index, view in enumerate(self._views)
            if self._parameters[index].grad is view
        }

    def _start_step(self) -> None:
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)
        self._is_ready = [False] * len(self.tensors)
        self._ready_count = 0
        self._started = []
        self._unused = []

    def _incomplete_message(self) -> str:
        missing = [
            spec.name for spec, ok in zip(self.tensors, self._is_ready, strict=True) if not ok
        ]
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if missing[5:] else "")
        return (
            f"the last backward pass gave no gradient to {len(missing)} parameters on rank "
            f"{self.communicator.rank}: {shown}. If a part of the model takes no part in every "
            "loss, wrap it with find_unused_parameters=True"
        )
