"""Adam whose second moment settles, so that its first may be averaged in few bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import WeakSet

import torch

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
