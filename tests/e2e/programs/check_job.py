"""Trainings for ``bagua-autotune check``: what their steps are made of is known.

``exposed``: far more to communicate than to compute; ``hidden``: the other way round; ``several``:
two backward passes that communicate in each step; ``fsdp``: no DistributedDataParallel;
``accumulates``: both; ``alone``: one process. ``hindered`` looks for unused parameters that there
are not, and is compiled in one piece. None of them knows anything of bagua_client.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

COMPUTING_SECONDS = 0.05


class Few(nn.Module):
    """Few weights, and a while to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(COMPUTING_SECONDS)
        return (self.weight * x).sum()


class Many(nn.Module):
    """64 MB of weights, of which only some are computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**12, 2**12))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight[:2] * x[0]).sum()


def model_of(kind: str) -> nn.Module:
    if kind == "hindered":
        # Whatever way it is compiled, torch's compiler counts it and has its setting.
        torch._dynamo.config.optimize_ddp = False
        return torch.compile(nn.Linear(2, 1), backend="eager")
    return Many() if kind == "exposed" else Few()


def wrapped(kind: str) -> nn.Module:
    model = model_of(kind)
    if kind == "alone":
        return model
    dist.init_process_group("gloo")
    if kind in ("fsdp", "accumulates"):
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    looks = kind == "hindered"
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=looks)


def main(kind: str, steps: int) -> None:
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2 if kind in ("several", "accumulates") else 1):
            model(torch.ones(2)).backward()
        optimizer.step()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
