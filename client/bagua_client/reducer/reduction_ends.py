"""When torch has reduced a step, without a communication hook: that costs about 10 us a bucket, and
more where the host has no time to spare."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.torch_private import reducer as torchs


class ReductionEnds:
    """Torch reduces in the first backward pass after a forward pass that synchronises, and that
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
