"""Where one step ends and the next begins: at the optimizer, not at each backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepBoundary:
    """Watches the optimizers of some parameters; optimizers that are not given are found when they
    step.

    A loop may run several backward passes for one step (a GAN's discriminator does); timing
    each would compare unlike with unlike.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer] = (),
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._ours = {id(parameter) for parameter in parameters}
        self._optimizers = [ref(optimizer) for optimizer in optimizers]
        self._others: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._stepped = True
        self._on_step = on_step
        reference = ref(self)

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            boundary = reference()
            if boundary is not None:
                boundary._after_step(optimizer)

        self._handle = register_optimizer_step_post_hook(hook)

    def begins(self) -> bool:
        """Whether the reduction that just ended is the first one of a step.

        Every one is, where no torch optimizer holds the parameters.
        """
        begins, self._stepped = self._stepped, True
        for reference in self._optimizers:
            if reference() is not None:
                self._stepped = False
        return begins

    def close(self) -> None:
        """Watch no longer."""
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        for reference in self._optimizers:
            if reference() is optimizer:
                self._step_made()
                return
        if optimizer in self._others:
            return
        if any(id(p) in self._ours for g in optimizer.param_groups for p in g["params"]):
            self._optimizers.append(ref(optimizer))
            self._step_made()
        else:
            self._others.add(optimizer)

    def _step_made(self) -> None:
        self._stepped = True
        self._on_step()
