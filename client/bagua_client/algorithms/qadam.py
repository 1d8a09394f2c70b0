"""Adam's momentum averaged in eight bits, once its second moment has settled."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch

from bagua_client.algorithms.base import Algorithm, register
from bagua_client.algorithms.bytegrad import ByteGradAlgorithm
from bagua_client.algorithms.companion import in_bucket
from bagua_client.algorithms.qadam_optimizer import QAdamOptimizer, optimizer_of
from bagua_client.communication.communicator import Communicator
from bagua_client.compression import RANGE_ELEMENTS
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket

WARM_UP, MOMENTA = 1, 2
"""Phases."""


@register("qadam", "Adam's momenta are averaged in 8 bits, after a warm-up")
class QAdamAlgorithm(ByteGradAlgorithm):
    """While ``q_adam_optimizer`` warms up, gradients are averaged without compression. After that
    each rank updates its momentum with its own gradients, and the momenta are averaged as by
    ``bytegrad``. From then on ``.grad`` holds the averaged momentum, so gradient clipping clips the
    momentum.

    Args:
        q_adam_optimizer: the optimizer of the model.
        hierarchical: begin with reducing inside nodes first.
        grad_scaler: the scaler that the training uses, if any; the momenta are then made from
            gradients scaled by it.

    Raises:
        TypeError: another optimizer.
    """

    needs_all_ranks = True

    def __init__(
        self,
        q_adam_optimizer: QAdamOptimizer,
        hierarchical: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError(
                f"qadam needs a QAdamOptimizer, not a {type(q_adam_optimizer).__name__}"
            )
        ranges = None if q_adam_optimizer.compatible else RANGE_ELEMENTS
        super().__init__(hierarchical, range_elements=ranges)
        self.optimizer = q_adam_optimizer
        self.grad_scaler = grad_scaler
        self._groups: dict[int, dict[str, Any]] = {}
        self.begin(WARM_UP)

    def reify(self, communicator: Communicator) -> QAdamAlgorithm:
        return copy.copy(self)

    @classmethod
    def offered(cls, parameters: Collection[torch.Tensor]) -> QAdamAlgorithm | None:
        found = optimizer_of(parameters)
        return None if found is None else cls(found)

    def end(self) -> None:
        self.optimizer.is_given_momenta = False

    @property
    def phase(self) -> int:
        is_over = self.optimizer.steps_done >= self.optimizer.warmup_steps
        return MOMENTA if is_over else WARM_UP

    @property
    def progress(self) -> int:
        return self.optimizer.steps_done

    @property
    def is_warming_up(self) -> bool:
        return self.phase == WARM_UP

    def begin(self, phase: int) -> None:
        self.is_torchs, self.scales_itself = phase == WARM_UP, phase == MOMENTA
        self.optimizer.is_given_momenta = phase == MOMENTA

    def multiple(self, communicator: Communicator, configuration: Configuration) -> int:
        return super().multiple(communicator, configuration) if self.scales_itself else 1

    def carries(self, flat: torch.Tensor) -> bool:
        return not self.scales_itself or super().carries(flat)

    def departs(self, bucket: GradBucket, wire: torch.Tensor) -> None:
        if not self.scales_itself:
            return
        if bucket.index() == 0 or not self._groups:
            self._groups = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
        scale = torch.ones((), device=wire.device)
        if self.grad_scaler is not None:
            scale = self.grad_scaler.scale(scale)
        for parameter, gradient in zip(bucket.parameters(), in_bucket(bucket)(wire), strict=True):
            if self.optimizer.is_warm(parameter):
                self._blend(parameter, gradient, scale)

    def _blend(self, parameter: torch.Tensor, gradient: torch.Tensor, scale: torch.Tensor) -> None:
        """Make the momentum in the gradient's place."""
        group = self._groups[id(parameter)]
        beta1 = group["betas"][0]
        if self.optimizer.compatible:
            beta1 = self.optimizer.param_groups[0]["betas"][0]
        elif group["weight_decay"]:
            gradient.add_(parameter.detach() * scale, alpha=group["weight_decay"])
        momentum = self.optimizer.state[parameter]["exp_avg"] * scale
        gradient.copy_(momentum.mul_(beta1).add_(gradient, alpha=1 - beta1))

    def exchange(self, *arguments: Any) -> Any:
        if self.scales_itself:
            return super().exchange(*arguments)
        return Algorithm.exchange(self, *arguments)
