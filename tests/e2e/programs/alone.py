"""A training of one process, as anybody writes it: no process group, nothing of ours.

    alone.py STEPS FILE

It writes what it came to: the loss of each step, and the weights in the end.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

STEPS, FILE = int(sys.argv[1]), sys.argv[2]


class Block(nn.Module):
    """A block that is recomputed, whose dropout draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.layers(x)
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([checkpoint_wrapper(Block()) for _ in range(4)])
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


torch.set_num_threads(1)
torch.manual_seed(0)
teacher = Model().requires_grad_(False)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
for step in range(STEPS):
    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    wanted = teacher(inputs)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), wanted)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 10 == 9:
        model.eval()
        with torch.no_grad():
            model(inputs)
        model.train()
assert not torch.distributed.is_initialized()
torch.save({"losses": losses, "weights": model.state_dict()}, FILE)
