"""Optimizers as strangers write them, loops over the parameters, each with something that makes
fusing it wrong, or right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer


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


class Stranger(Optimizer):
    """Gives ``update`` each parameter in turn."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "is_layer_wise": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])
        return loss

    def update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])  # type: ignore[arg-type]


class LaggedLars(Stranger):
    """The norm that it divides by is that of the step before."""

    def update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        norm = state.get("norm", torch.ones(()))
        p.sub_(p.grad / norm, alpha=group["lr"])  # type: ignore[operator]
        state["norm"] = p.grad.norm()  # type: ignore[union-attr]


class AggMo(Stranger):
    """Its state is a dictionary of tensors (Lucas et al., 2019)."""

    def update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["momenta"] = {beta: torch.zeros_like(p) for beta in group["betas"]}
        for beta, momentum in state["momenta"].items():
            momentum.mul_(beta).add_(p.grad)
            p.sub_(momentum, alpha=group["lr"] / 2)


class HalfWay(Stranger):
    """Changes weights, a state, a setting, itself and takes a random number, then raises."""

    seen = 0

    def update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        self.seen += 1
        group["lr"] = group["lr"] * 0.5
        state["noise"] = torch.rand_like(p)
        p.add_(1)
        p.grad.zero_()  # type: ignore[union-attr]
        if p.ndim == 1 and p.numel() > 10:
            raise RuntimeError("too long")


class Switched(Stranger):
    """Layer-wise where a setting says so."""

    def update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        update = p.grad / p.grad.norm() if group["is_layer_wise"] else p.grad  # type: ignore
        p.sub_(update, alpha=group["lr"])


class Counting(Stranger):
    """The n-th parameter is stepped by another rate than the first."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                p.data.sub_(p.grad, alpha=group["lr"] / (place + 1))


class Carrying(Stranger):
    """Uses what it found for the parameter before."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            scale = 1.0
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] * scale)
                scale = scale / 2


class Sharing(Stranger):
    """Counts in its group how many parameters it has stepped."""

    def update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        group["count"] = group.get("count", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / group["count"])  # type: ignore[arg-type]


class Sliced(Stranger):
    """The first row stays as it is."""

    def update(self, p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        p[1:].sub_(p.grad[1:], alpha=group["lr"])  # type: ignore[index]


class OwnInit(Adam):
    """Torch's Adam with a part of its own."""

    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)


def exists(value: Any) -> bool:
    return value is not None


def lion(p: Tensor, grad: Tensor, mean: Tensor, lr: float, beta1: float, beta2: float) -> None:
    p.data.mul_(1.0 - lr * 0.1)
    p.add_(mean.clone().mul_(beta1).add(grad, alpha=1.0 - beta1).sign_(), alpha=-lr)
    mean.mul_(beta2).add_(grad, alpha=1.0 - beta2)


class Lion(Stranger):
    """Chen et al., 2023; a filter, a tuple of settings, and a function of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rule = lion

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in filter(lambda p: exists(p.grad), group["params"]):
                grad, lr, beta1, beta2, state = p.grad, group["lr"], *group["betas"], self.state[p]
                if len(state) == 0:
                    state["mean"] = torch.zeros_like(p)
                self.rule(p, grad, state["mean"], lr, beta1, beta2)


class Data(Stranger):
    """Works on ``data``, changes gradients, and keeps a buffer from its first step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                change = p.grad.data
                change.add_(p.data, alpha=0.01)
                state = self.state[p]
                if "buffer" not in state:
                    buffer = state["buffer"] = torch.clone(change).detach()
                else:
                    buffer = state["buffer"]
                    buffer.mul_(0.9).add_(change)
                p.data -= group["lr"] * buffer


def adam(params: Any, grads: Any, means: Any, squares: Any, steps: Any, *, lr: float) -> None:
    for place, param in enumerate(params):
        step = steps[place]
        step += 1
        means[place].lerp_(grads[place], 0.1)
        squares[place].mul_(0.99).addcmul_(grads[place], grads[place], value=0.01)
        scale = math.sqrt(1 - 0.99 ** step.item()) / (1 - 0.9 ** step.item())
        param.addcdiv_(means[place], squares[place].sqrt().add_(1e-8), value=-lr * scale)


class Functional(Stranger):
    """Adam as torch writes it: lists, and a function that goes over them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            params: list[Tensor] = []
            grads, means, squares, steps = [], [], [], []
            for p in group["params"]:
                if p.grad is None:
                    continue
                params.append(p)
                grads.append(p.grad)
                state = self.state[p]
                if not state:
                    state.update({"step": torch.tensor(0.0), "mean": torch.zeros_like(p)})
                    state["square"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                means.append(state["mean"])
                squares.append(state["square"])
                steps.append(state["step"])
            adam(params, grads, means, squares, steps, lr=group["lr"])


class Slower(Adam):
    """Torch's own step, with a rate that falls."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.99 * group["lr"]
        return super().step(closure)
