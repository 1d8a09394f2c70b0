"""Optimizers as people write them: a loop over the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LoopAdam(Optimizer):
    """Adam (Kingma and Ba, 2015, algorithm 1), with decoupled weight decay.

    Attributes:
        calls: of its step.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.01, beta: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        state["step"] += 1
        beta = group["beta"]
        state["mean"].mul_(beta).add_(grad, alpha=1 - beta)
        state["square"].mul_(0.999).addcmul_(grad, grad, value=0.001)
        mean = state["mean"] / (1 - beta ** state["step"])
        square = state["square"] / (1 - 0.999 ** state["step"])
        self.apply(p, mean / (square.sqrt() + 1e-8), group)

    def apply(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


class LoopLamb(LoopAdam):
    """LAMB (You et al., 2020, algorithm 2): each tensor's norms decide how far it goes."""

    def apply(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        ratio = p.norm() / update.norm().clamp(min=1e-6)
        p.sub_(update, alpha=group["lr"] * float(ratio))


class Replacing(LoopAdam):
    """Its states are new tensors each time, and it counts in its group."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        group["seen"] = True
        state["momentum"] = grad if not state else state["momentum"] * group["beta"] + grad
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        p.sub_(state["momentum"], alpha=group["lr"])


class Noisy(LoopAdam):
    """Rounds at random, as some do for weights of few bits."""

    def apply(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        p.sub_(update + 0.1 * torch.rand_like(p), alpha=group["lr"])


class Named(LoopAdam):
    """Knows its parameters from the beginning."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scales = {p: 1.0 for group in self.param_groups for p in group["params"]}

    def apply(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        p.sub_(update, alpha=group["lr"] * self.scales[p])


class Ahead(LoopAdam):
    """Steps by the gradients of weights that are moved against them before (Foret et al., 2021)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        assert closure is not None
        parameters = [p for group in self.param_groups for p in group["params"]]
        moves = [0.1 * p.grad for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            loss = closure()
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move)
        super().step()
        return loss
