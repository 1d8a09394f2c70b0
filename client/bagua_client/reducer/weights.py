"""A model's weights as flat tensors, and the moments of a step at which they may travel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm
from bagua_client.algorithms.companion import in_order
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.pipeline import Arrival
from bagua_client.layout import Layout
from bagua_client.reducer.carrier import Carrier


class Weights:
    """What an algorithm that moves weights works on.

    Args:
        layout: what is in force.

    Attributes:
        parameters: of the model.
        communicator: of the ranks that train it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        algorithm: Algorithm,
        communicator: Communicator,
        layout: Callable[[], Layout],
    ) -> None:
        self.communicator = communicator
        self.parameters = parameters
        self._layout = layout
        self._carrier = Carrier(algorithm, communicator)

    @property
    def whole(self) -> list[list[torch.nn.Parameter]]:
        """All in one bucket, of each dtype and device."""
        groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        return list(groups.values())

    @property
    def buckets(self) -> list[list[torch.nn.Parameter]]:
        """As the layout cuts them."""
        return [[self.parameters[i] for i in bucket] for bucket in self._layout().partition]

    @property
    def reduces_by_node(self) -> bool:
        """Whether one rank of each node exchanges what travels."""
        configuration = self._layout().configuration
        return self.communicator.ranks_across(configuration) < self.communicator.world_size

    def flat(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """A copy of their values, one after the other, filled up with zeros to what can travel."""
        elements = sum(parameter.numel() for parameter in parameters)
        missing = -elements % self._carrier.multiple(self._layout().configuration)
        flat = parameters[0].new_zeros(elements + missing, requires_grad=False)
        torch.cat([p.detach().reshape(-1) for p in parameters], out=flat[:elements])
        return flat

    def carry(self, flat: torch.Tensor) -> Arrival:
        """Start ``flat`` on the algorithm's chain."""
        return self._carrier.carry(flat, self._layout().configuration)

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
        """Give them the values of ``flat``, which is laid out as :meth:`flat`'s."""
        for parameter, values in zip(parameters, in_order(parameters)(flat), strict=False):
            parameter.copy_(values)

    def close(self) -> None:
        """Let go of threads."""
        self._carrier.close()


class Model(Protocol):
    """What is trained, and the layout that is in force."""

    algorithm: Algorithm
    communicator: Communicator
    parameters: list[torch.nn.Parameter]
    layout: Layout


class _Closing:
    """Lets go of what a wrapper that is gone had; holds nothing that holds it."""

    def __init__(self, handle: RemovableHandle, weights: Weights) -> None:
        self._handle = handle
        self._weights = weights

    def __call__(self) -> None:
        self._handle.remove()
        self._weights.close()


class Moments:
    """Tells an algorithm the moments of each step.

    After a step's backward pass the weights are due to be stepped. That is over when optimizers
    have stepped all of them, or else, where one is left out (a scaler has skipped its step, say),
    when the next forward pass begins: so on every rank once for every backward pass.
    """

    def __init__(self, model: Model, wrapper: torch.nn.Module) -> None:
        models, reference = weakref.ref(model), weakref.ref(self)

        def layout() -> Layout:
            found = models()
            assert found is not None, "weights travel while their model trains"
            return found.layout

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (moments := reference()) is not None:
                moments._optimizer_stepped(optimizer)

        self._algorithm = model.algorithm
        self._weights = Weights(model.parameters, model.algorithm, model.communicator, layout)
        self._ours = {id(parameter) for parameter in model.parameters}
        self._missing: set[int] = set()
        closing = _Closing(register_optimizer_step_post_hook(hook), self._weights)
        weakref.finalize(wrapper, closing)

    def catch_up(self) -> None:
        """A forward pass of the next step begins: the step before it has ended on all ranks."""
        if self._missing:
            self._step_ends()

    def forward_begins(self) -> None:
        """Of a pass that is trained and synchronised."""
        self._algorithm.forward_begins(self._weights)

    def backward_ends(self) -> None:
        """Gradients are there."""
        self._missing = set(self._ours)
        self._algorithm.backward_ends(self._weights)

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._missing:
            return
        for group in optimizer.param_groups:
            self._missing.difference_update(map(id, group["params"]))
        if not self._missing:
            self._step_ends()

    def _step_ends(self) -> None:
        self._missing = set()
        self._algorithm.step_ends(self._weights)
