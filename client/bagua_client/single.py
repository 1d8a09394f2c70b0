"""A model that a process trains by itself, which is changed between two steps.

A step ends where a backward pass that began at the model's output is over. A change is made where a
forward pass of the whole model for training begins. Passes in eval mode or without gradients count
for nothing.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms import DEFAULT_ALGORITHM, find
from bagua_client.communication.communicator import Alone
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, describe, plan
from bagua_client.torch_private.reducer import after_backward, is_in_backward
from bagua_client.torch_private.wrapper import called_untraced
from bagua_client.tunable.looks import a_look, why_not_timed
from bagua_client.tunable.memory import MeasuredMemory
from bagua_client.tunable.offer import Offer
from bagua_client.tunable.passes import is_of_training, tensors_in
from bagua_client.tunable.tunable import Tunable

JOINED = "the process trains together with others by now: it has a process group"


def trains(model: torch.nn.Module) -> bool:
    """Whether a forward pass of a model that begins now is one of a training."""
    is_trained = torch.is_grad_enabled() and model.training
    return is_trained and any(parameter.requires_grad for parameter in model.parameters())


@a_look
def refusal_of(model: torch.nn.Module) -> str:
    """Why no setting of a model can be changed that this process trains by itself; empty: some
    can."""
    if isinstance(model, torch.nn.DataParallel):
        return "torch.nn.DataParallel makes copies of the model in each step"
    return why_not_timed(parameter.device for parameter in model.parameters())


@dataclass(frozen=True, kw_only=True)
class SingleOffer(Offer):
    """Nothing travels, so the settings that can be changed are those that any training has."""

    kind = "single"


class TunableSingle(Tunable):
    """One model; see :class:`Tunable`.

    Args:
        model: what is trained.
        called: what the training calls: the model itself, or what ``torch.compile`` made of it.
    """

    cannot, failed = "cannot change the model", "changing the model failed"
    communicator: Alone

    def __init__(self, model: torch.nn.Module, called: torch.nn.Module) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        device = trained[0][1].device
        super().__init__(Alone(device), model, device)
        self.parameters = [each for _, each in trained]
        self.tensors = describe(trained)
        # Gradients become ready from the model's end on.
        self.order = tuple(reversed(range(len(trained))))
        self.algorithm = find(DEFAULT_ALGORITHM)
        self.default = self.recomputation.named(Configuration())
        self.layout = plan(self.tensors, self.order, self.default)
        if self.device_memory is not None and self.recomputation:
            self.memory = MeasuredMemory(self.device_memory, self.layout, self.recomputation)
        self._is_in_step = False
        # What is made of a compiled model runs its hooks itself; what is compiled leaves ours out.
        self._handles = [
            called.register_forward_pre_hook(self._forward_begins, prepend=True),
            called.register_forward_hook(self._forward_ends),
        ]
        weakref.finalize(model, self.forget).atexit = False

    def forget(self) -> None:
        """See :meth:`Tunable.forget`; nor are the model's parameters held any longer."""
        super().forget()
        self.parameters = ()

    @property
    def hooks(self) -> frozenset[int]:
        """The numbers of ours among the hooks of what the training calls."""
        own = (*self._handles, *self.recomputation.handles, self._sees_inputs)
        return frozenset(handle.id for handle in own if handle is not None)

    # Plan

    @property
    def offer(self) -> SingleOffer:
        return SingleOffer(
            default=self.default,
            communicator=self.communicator,
            algorithms=lambda allowed: [self.algorithm],
            recomputed=self.recomputed,
        )

    @property
    def refusal(self) -> str:
        model = self._model()
        if dist.is_initialized() and dist.get_world_size() > 1:
            return JOINED
        return "" if model is None else refusal_of(model)

    def _put(self, layout: Layout) -> None:
        self.recomputation.put(layout.configuration.recomputed_blocks)

    def _described(self, layout: Layout) -> str:
        return f"the model trains with {layout.configuration}, set"

    # Measure

    def _forward_begins(self, called: torch.nn.Module, _: Any) -> None:
        if not is_of_training(called):
            return
        if not is_in_backward():  # The last backward pass may have ended with an error.
            self._is_in_step = False
        if self._next is not None:
            self._carry_out()

    def _forward_ends(self, called: torch.nn.Module, _: Any, output: Any) -> None:
        if is_of_training(called):
            self.observers.call(self._follow_back, output)

    def _follow_back(self, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                hook = called_untraced(self._backward_begins)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _backward_begins(self, _: torch.Tensor) -> None:
        """A backward pass has come to the model's output, of which there may be several parts."""
        if not self._is_in_step:
            self._is_in_step = True
            after_backward(self._step_ends)

    def _step_ends(self) -> None:
        self._is_in_step = False
        self._count_step()
        self.listener.reduced()
