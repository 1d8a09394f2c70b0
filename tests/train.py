"""The training that the documentation calls train.py: small, tuned, and ended when it is.

Started by torchrun, by srun, or alone; whatever arguments it has.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn

import bagua_client

STEPS = 30
MOST_SECONDS = 250.0
"""Only to end a tuning that hangs: it fails then."""


def main() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)]
    model = bagua_client.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began, steps = time.monotonic(), 0
    while steps < STEPS or model.is_tuning:
        steps += 1
        optimizer.zero_grad()
        model(torch.randn(8, 128)).square().mean().backward()
        optimizer.step()
        time.sleep(0.005)
        if time.monotonic() - began > MOST_SECONDS:
            raise TimeoutError(f"still being tuned after {steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
