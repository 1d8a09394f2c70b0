"""What the rank programs share: how they join, which rank was slowest, how they write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def process_group(device: str) -> Iterator[torch.device]:
    """The group of all ranks that torchrun started; answers with this rank's device."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.benchmark = True
        dist.init_process_group("nccl")
        yield torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        yield torch.device("cpu")
    # Not after an error: the other ranks may wait where this one never comes.
    dist.destroy_process_group()


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The largest over all ranks, of each. All ranks must call it together."""
    every = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return every.tolist()


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(path)
