"""When torch has reduced a step, without a communication hook: that costs about 10 us a bucket."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.torch_private import reducer as torchs


class ReductionEnds:
    """Torch reduces in the first backward pass after a forward pass that synchronises. A hook on
    one gradient, which each of them computes, tells of the pass.

    Args:
        tell: called when torch has waited for all buckets.

    Attributes:
        is_due: whether torch reduces in the next backward pass.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self.is_due = False
        self._tell = tell
        self._handles: list[RemovableHandle] = []

    def follow(self, parameter: torch.nn.Parameter) -> None:
        """Follow the ends of reductions from now on, by the gradient of ``parameter``."""
        self.stop()
        reference = weakref.ref(self)  # The parameter keeps the hook.

        def ready(_: int) -> None:
            ends = reference()
            if ends is not None and ends.is_due:
                ends.is_due = False
                torchs.after_backward(ends._tell)

        self._handles = torchs.on_each_gradient([parameter], ready)

    @property
    def are_followed(self) -> bool:
        """Whether they are told."""
        return bool(self._handles)

    def stop(self) -> None:
        """Stop telling."""
        torchs.remove(self._handles)
