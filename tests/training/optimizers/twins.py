"""A model and its copy, of which one has a fused optimizer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bagua_training.optimizers import fuse_optimizer


def fused_count(optimizer: Any) -> int:
    """Of how many parameters the updates were fused, under Bagua's name."""
    return int(optimizer._bagua_fused_count)


class Twins:
    """A model and a copy of it, each with an optimizer, of which the first is fused."""

    def __init__(self, made: Any, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.fused_model = model or nn.Sequential(
            nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1)
        )
        self.plain_model = copy.deepcopy(self.fused_model)
        self.plain = made(groups_of(self.plain_model))
        self.fused = fuse_optimizer(made(groups_of(self.fused_model)), **options)
        self.generator = torch.Generator().manual_seed(1)

    @property
    def fused_count(self) -> int:
        return fused_count(self.fused)

    def backward(self, unused: tuple[int, ...] = ()) -> None:
        """Gradients that are new each time; some parameters have none."""
        for ours, theirs in zip(*self.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=self.generator).to(ours.device)
            theirs.grad = ours.grad.clone()
        for place in unused:
            for parameters in self.parameters():
                parameters[place].grad = None

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(self.fused_model.parameters()), list(self.plain_model.parameters())

    def steps(self, number: int, method: str = "fuse_step", unused: tuple[int, ...] = ()) -> None:
        """Both make the same steps, and are alike after each."""
        for _ in range(number):
            self.backward(unused)
            getattr(self.fused, method)()
            self.plain.step()
            self.check()

    def check(self) -> None:
        assert all(map(torch.equal, *self.parameters()))
        ours, theirs = self.fused.state_dict(), self.plain.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for place, state in ours["state"].items():
            assert state.keys() == theirs["state"][place].keys()
            for name, value in state.items():
                assert _equal(value, theirs["state"][place][name])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two: weights and biases."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [{"params": weights}, {"params": others, "lr": 0.02}]
