"""Where one step ends and the next begins: at the optimizer, not at each backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua_client.torch_private.wrapper import called_untraced
from bagua_client.tunable.observers import Observers


class StepBoundary:
    """Watches the optimizers of some parameters; optimizers that are not given are found when they
    step. Which of ours one holds is looked up in each of its steps, as that may change:
    by ``add_param_group``, or where a training puts other parameters into a group.

    A loop may run several backward passes for one step (a GAN's discriminator does); timing
    each would compare unlike with unlike.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer] = (),
        on_step: Callable[[], None] = lambda: None,
        observers: Observers | None = None,
    ) -> None:
        self._ours = {id(parameter) for parameter in parameters}
        self._given = [ref(optimizer) for optimizer in optimizers]
        self._found: list[ref[torch.optim.Optimizer]] = []
        self._stepped = True
        self._on_step = on_step
        reference, call = ref(self), (observers or Observers()).call

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            boundary = reference()
            if boundary is not None:
                call(boundary._after_step, optimizer)

        self._handle = register_optimizer_step_post_hook(called_untraced(hook))

    def begins(self) -> bool:
        """Whether the reduction that just ended is the first one of a step.

        Every one is, where no torch optimizer holds the parameters.
        """
        begins, self._stepped = self._stepped, True
        for reference in (*self._given, *self._found):
            if reference() is not None:
                self._stepped = False
        return begins

    def close(self) -> None:
        """Watch no longer."""
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        is_known = _holds(self._found, optimizer)
        if _holds(self._given, optimizer) or self._has_ours(optimizer):
            if not is_known:
                self._found.append(ref(optimizer))
            self._stepped = True
            self._on_step()
        elif is_known:
            self._found = [each for each in self._found if each() is not optimizer]

    def _has_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        return not all(self._ours.isdisjoint(map(id, group["params"])) for group in groups)


def _holds(
    references: Iterable[ref[torch.optim.Optimizer]], optimizer: torch.optim.Optimizer
) -> bool:
    """Whether one is this optimizer, by identity: an optimizer may compare as it likes."""
    return any(reference() is optimizer for reference in references)
