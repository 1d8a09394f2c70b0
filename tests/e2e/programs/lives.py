"""A training under torchrun: as many lives of torch.distributed in one process as asked for, each
of which ends in the middle of its tuning. With one life the process ends at once after it.

    torchrun ... lives.py stock|ours LIVES SECONDS FOLDER

Each rank prints after each life what it has left: descriptors and native threads. The steps of a
life end after so many seconds of rank 0's.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

LONGEST_SECONDS = 20.0


def left() -> tuple[int, int]:
    """Descriptors and native threads, once ours has told its service that the life is over."""
    began = time.monotonic()
    while any(thread.name.startswith("bagua-") for thread in threading.enumerate()):
        if time.monotonic() - began > LONGEST_SECONDS:
            break
        time.sleep(0.01)
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def live(kind: type[Stock], seconds: float) -> None:
    torch.manual_seed(5)
    layers = [layer for _ in range(6) for layer in (nn.Linear(224, 224), nn.Tanh())]
    model = kind(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    began, goes_on = time.monotonic(), torch.ones(1)
    while goes_on.item():
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(12, 224)).square().mean().backward()
            optimizer.step()
        goes_on.fill_(time.monotonic() - began < seconds)
        dist.broadcast(goes_on, 0)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha1(flat.numpy().tobytes()).hexdigest())
    assert len(set(digests)) == 1, "the replicas differ"


def main() -> None:
    name, lives, seconds, folder = sys.argv[1:]
    kind = Stock
    if name == "ours":
        from bagua_client import DistributedDataParallel as kind  # type: ignore[assignment]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for life in range(int(lives)):
        store = dist.FileStore(f"{folder}/{name}{life}", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        live(kind, float(seconds))
        gc.collect()
        dist.destroy_process_group()
        del store
        gc.collect()
        if int(lives) > 1:
            found = " ".join(map(str, left()))
            # In one piece: the ranks share a pipe.
            print(f"life {life} rank {rank} leaves {found}\n", end="", flush=True)


if __name__ == "__main__":
    main()
