"""Adam whose second moment settles, so that its momentum is averaged in eight bits from then on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import WeakSet

import torch

from bagua_client.algorithms.base import Algorithm, register
from bagua_client.algorithms.bytegrad import ByteGradAlgorithm
from bagua_client.algorithms.companion import in_bucket
from bagua_client.communication.communicator import Communicator
from bagua_client.compression import RANGE_ELEMENTS
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket

_optimizers: WeakSet[QAdamOptimizer] = WeakSet()


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam in two parts (Tang et al., 1-bit Adam, ICML 2021; here in eight bits): for
    ``warmup_steps`` it is Adam; then the second moment stays as it is, and the gradient that it is
    given is the new first moment, which :class:`QAdamAlgorithm` has made of the local ones.

    With ``t`` the step, ``T`` the last of the warm-up, ``m`` and ``v`` the moments::

        t <= T:  g += weight_decay * x;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        t > T:   m is what has travelled;  v stays
        x -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^min(t, T)) + eps)

    Args:
        params, lr, betas, eps, weight_decay: as Adam's.
        warmup_steps: at least 1.
        compatible: as Bagua 0.9 does it: step ``T`` changes neither moment, the correction of ``v``
            goes on with ``t`` (steps grow 3.2 times as long by and by), and there is no weight
            decay after the warm-up.

    Raises:
        ValueError: a number outside its domain.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        compatible: bool = False,
    ) -> None:
        checks = [("lr", lr >= 0, lr), ("eps", eps >= 0, eps)]
        checks += [(f"betas[{i}]", 0 <= beta < 1, beta) for i, beta in enumerate(betas)]
        checks += [("warmup_steps", warmup_steps > 0, warmup_steps)]
        for name, is_fine, value in checks:
            if not is_fine:
                raise ValueError(f"invalid {name}: {value}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.warmup_steps = warmup_steps
        self.compatible = compatible
        self.is_given_momenta = False
        _optimizers.add(self)

    @property
    def steps_done(self) -> int:
        """The largest number of steps of any parameter."""
        return max((state.get("step", 0) for state in self.state.values()), default=0)

    def is_warm(self, parameter: torch.Tensor) -> bool:
        """Whether it has made the steps of the warm-up: one that is thawed later has its own."""
        return bool(self.state.get(parameter, {}).get("step", 0) >= self.warmup_steps)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state, made if it is missing or empty."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return the loss of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(
        self, parameter: torch.nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self._state_of(parameter)
        state["step"] += 1
        t, (beta1, beta2) = state["step"], group["betas"]
        m, v = state["exp_avg"], state["exp_avg_sq"]
        if self.is_given_momenta and t > self.warmup_steps:
            m.copy_(gradient)
        elif t < self.warmup_steps or not self.compatible:
            if group["weight_decay"]:
                gradient = gradient.add(parameter, alpha=group["weight_decay"])
            m.mul_(beta1).add_(gradient, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        settled = t if self.compatible else min(t, self.warmup_steps)
        scale = (v.sqrt() / math.sqrt(1 - beta2**settled)).add_(group["eps"])
        parameter.addcdiv_(m, scale, value=-group["lr"] / (1 - beta1**t))


def optimizer_of(parameters: Collection[torch.Tensor]) -> QAdamOptimizer | None:
    """The one that steps these parameters and no other, if there is one."""
    wanted = {id(parameter) for parameter in parameters}
    for optimizer in _optimizers:
        if wanted == {id(p) for group in optimizer.param_groups for p in group["params"]}:
            return optimizer
    return None


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
