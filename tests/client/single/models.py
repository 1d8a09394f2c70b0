"""Small models that a process trains by itself, with blocks that are recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bagua_client

WIDTH, BLOCKS = 8, 4
Plan = Mapping[int, int]
"""Before which step how many blocks are recomputed from then on."""


class Model(nn.Module):
    """Dropout draws random numbers in its blocks."""

    def __init__(self, recomputes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
            for _ in range(BLOCKS)
        ]
        self.blocks = nn.Sequential(*map(checkpoint_wrapper, blocks) if recomputes else blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.blocks(x)
        return {"hidden": hidden, "out": self.head(hidden)}


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class Training:
    """Of one model.

    Args:
        called: makes of the model what the training calls.
    """

    def __init__(self, model: Model, called: Any = None) -> None:
        self.model = model
        self._called = model if called is None else called(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(2)

    def step(self, number: int) -> float:
        """Returns the loss."""
        found = self._called(batch_of(number))
        loss = found["out"].square().mean() + found["hidden"].mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def run(self, steps: int, plan: Plan | None = None) -> list[float]:
        """The loss of each step."""
        losses = []
        for number in range(steps):
            if plan and number in plan:
                changed: Any = self.model
                asked = bagua_client.Configuration(recomputed_blocks=plan[number])
                assert changed.reconfigure(asked)
            losses.append(self.step(number))
            with torch.no_grad():
                self._called(batch_of(number))
        return losses
