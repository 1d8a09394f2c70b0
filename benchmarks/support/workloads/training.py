"""What a job needs to know of a workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import nn


class Training(Protocol):
    """One rank's part of a data-parallel training, for several wrappers side by side."""

    def model(self) -> nn.Module:
        """A replica to be wrapped. Each wrapper needs one of its own, as each hooks into it."""

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        """Makes one step of the wrapped model with each call: gradients are let go of, forward
        and backward pass, and the optimizer's step where there is one."""


def gradient_sizes(model: nn.Module) -> list[int]:
    """Bytes of each parameter's gradient."""
    # Of a parameter that ZeRO's stage 3 has spread nothing is left but what it says itself.
    return [
        getattr(p, "ds_numel", p.numel()) * p.element_size()
        for p in model.parameters()
        if p.requires_grad
    ]
