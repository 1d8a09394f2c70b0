"""A training script that knows only torch: trains in the ways of its arguments, tells its losses.

python stock_script.py FOLDER WAY...
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 40
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "accumulated": {"gradient_as_bucket_view": True},
    "half": {},
}


class Model(nn.Module):
    """Of some kilobytes; one of its branches is left out of some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh())
        self.branch = nn.Linear(24, 24)
        self.last = nn.Linear(24, 3)

    def forward(self, inputs: torch.Tensor, takes_branch: bool) -> torch.Tensor:
        x = self.first(inputs)
        output: torch.Tensor = self.last(self.branch(x) if takes_branch else x)
        return output


def train(way: str) -> list[float]:
    torch.manual_seed(0)
    model = DDP(Model(), **ARGUMENTS[way])
    assert type(model) is DDP
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if way == "half":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        for micro in range(3 if way == "accumulated" else 1):
            inputs = torch.randn(4, 8)
            waits = way == "accumulated" and micro < 2
            with model.no_sync() if waits else nullcontext():
                output = model(inputs, way != "unused" or step % 3 > 0)
                loss = nn.functional.mse_loss(output, 2 * inputs[:, :3])
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(value.sum().item() for value in model.state_dict().values())]


if __name__ == "__main__":
    folder, *ways = sys.argv[1:]
    dist.init_process_group("gloo")
    losses = {way: train(way) for way in ways}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()
