"""What is seen of a model's steps on one rank: the order in which its gradients become ready,
where its reductions end, and, where somebody records a step, when."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from bagua_client.communication.agreement import Group, Vote
from bagua_client.layout import digest_of
from bagua_client.reducer.carrier import Mark
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import GradBucket
from bagua_client.tunable.looks import Observers
from bagua_client.tunable.tunable import Timeline

UNKNOWN = 0
"""The vote of a rank that has not seen all gradients."""


class ReadyOrder:
    """The order, learned once. When torch cuts the buckets, it sends rank 0's order to all ranks.

    Args:
        parameters: of ``ddp``, in its reducer's order.
        observers: by way of which the order is looked at.

    Attributes:
        indices: parameter indices in that order; until it is known, the last parameter first.
        is_agreed: whether the ranks have compared what they saw; changes on all in the same step.
        is_known: whether all have seen the same.
        used: indices of the parameters that have got a gradient since the last reduction.
        learned: the order in which the next step's buckets are cut, as far as this rank has seen
            it; empty: it has not, or torch keeps the model's.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ddp: DistributedDataParallel,
        observers: Observers,
    ) -> None:
        self._parameters = parameters
        self._observers = observers
        self.indices: tuple[int, ...] = tuple(reversed(range(len(parameters))))
        self.is_known = self.is_agreed = False
        self.used = {i: None for i, p in enumerate(parameters) if p.grad is not None}
        self.learned: tuple[int, ...] = ()
        self._seen: list[int] = []
        # Not by way of the observers: torch's own search for unused parameters needs it.
        self._handles = torchs.on_each_gradient(parameters, self._came)
        weakref.finalize(ddp, torchs.remove, self._handles)

    def _came(self, index: int) -> None:
        """A parameter has got a gradient."""
        self.used.pop(index, None)  # The latest is the last.
        self.used[index] = None

    def saw(self, bucket: GradBucket) -> None:
        """Record the parameters of a bucket that is full."""
        if not self.is_agreed:
            index_of = {id(parameter): i for i, parameter in enumerate(self._parameters)}
            self._seen += [index_of[id(parameter)] for parameter in bucket.parameters()]

    def step_ends(self, steps: int, is_kept: bool, voters: tuple[Group, torch.device]) -> bool:
        """Note that all buckets of a step were seen. All ranks call this together: what some have
        not seen is known to none, as algorithms communicate in this order, too.

        Args:
            steps: how many were made with torch's final buckets, which it cuts after the first
                steps; 0: the next one is the first.
            is_kept: whether torch cuts in the order in which the model lists its parameters,
                whatever it has seen.
            voters: a group of all ranks, and a device that it communicates from.

        Returns:
            Whether ``indices`` has changed.
        """
        came, self.used = tuple(self.used), {}
        if self.is_agreed:
            return False
        seen, self._seen = tuple(self._seen), []
        if steps <= 0 or is_kept:
            if steps == 0 and not is_kept and len(came) == len(self._parameters):
                self.learned = came
            self.is_agreed = steps > 0
            return False
        vote = self._observers.call(self._digest, seen) or UNKNOWN
        votes = Vote(vote, *voters).values()
        self.is_agreed = True
        if UNKNOWN in votes or len(set(votes)) > 1:
            return False
        self.take(seen)
        return True

    def stop(self) -> None:
        """Stop looking at gradients."""
        torchs.remove(self._handles)

    def _digest(self, seen: Sequence[int]) -> int:
        if sorted(seen) != sorted(self.indices):
            raise RuntimeError(f"{len(seen)} of {len(self.indices)} gradients were seen")
        return digest_of(seen)

    def take(self, indices: Sequence[int]) -> None:
        """The order that all ranks have, and buckets are cut in from now on."""
        self.indices = self.learned = tuple(indices)
        self.is_agreed = self.is_known = True
        self.stop()


class BucketObservation:
    """What is seen of one model's steps: when gradients become ready, and buckets travel.

    Args:
        parameters: the model's, in the reducer's order.
        ddp: the wrapper.

    Attributes:
        order: in which gradients become ready.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        ddp: DistributedDataParallel,
        observers: Observers,
    ) -> None:
        self.order = ReadyOrder(parameters, ddp, observers)
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
        return on_end


class ReductionEnds:
    """When torch has reduced a step, without a communication hook: that costs about 10 us a bucket,
    and more where the host has no time to spare.

    Torch reduces in the first backward pass after a forward pass that synchronises, and that
    pass reaches all parameters. A hook on the gradient that mostly comes last tells of the pass.

    Where the training reaches the parameters in several backward passes, or parts of its model make
    passes of their own inside another (checkpointing does), the end of the pass of that gradient
    may come too early. Then hooks on all gradients tell of all passes, from there on.

    Args:
        is_finished: whether torch has waited for all buckets.
        computed: called at the end of a pass, before torch waits for its buckets.
        tell: called when it has waited for all of them.

    Attributes:
        is_due: whether torch reduces in the next backward pass.
    """

    def __init__(
        self,
        is_finished: Callable[[], bool],
        computed: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        self.is_due = False
        self._is_finished, self._computed, self._tell = is_finished, computed, tell
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._handles: list[RemovableHandle] = []
        self._in_parts = False
        self._pass = -1

    def follow(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Follow the ends of reductions from now on, by the last of the ``parameters``."""
        if not self._handles:
            self._parameters = parameters
            self._listen()

    @property
    def are_followed(self) -> bool:
        """Whether they are told."""
        return bool(self._handles)

    def stop(self) -> None:
        """Stop telling."""
        torchs.remove(self._handles)

    def _listen(self) -> None:
        self.stop()
        reference = weakref.ref(self)  # The parameters keep the hooks.

        def ready(_: int) -> None:
            ends = reference()
            if ends is not None and ends.is_due:
                ends._ready()

        parameters = self._parameters if self._in_parts else self._parameters[-1:]
        self._handles = torchs.on_each_gradient(parameters, ready)

    def _ready(self) -> None:
        """A gradient is there; once in each pass, its end is awaited."""
        now = torchs.backward_pass()
        if now != self._pass:
            self._pass = now
            torchs.before_backward_ends(self._computed)
            torchs.after_backward(self._passed)

    def _passed(self) -> None:
        """The pass is over."""
        if self._is_finished():
            if self.is_due:
                self.is_due = False
                self._tell()
        elif not self._in_parts:
            self._in_parts = True
            self._listen()
