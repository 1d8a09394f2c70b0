"""What the rank programs share: their command line, how they join, how steps are timed."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua_client.measuring.clock import clock_for
from benchmarks.support.workloads import gradient_sizes

LAST_OPERATION_SECONDS = 0.2

Work = Callable[[Mapping[str, Any], torch.device], Mapping[str, Any]]
"""Takes SPEC and the rank's device, gives OUT; all ranks call it together."""


def run(description: str, work: Work) -> None:
    """The program of a rank: reads SPEC, works with the others; rank 0 writes OUT."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    spec = json.loads(options.spec.read_text())
    with process_group(spec.get("device", "cpu")) as device:
        result = work(spec, device)
        if dist.get_rank() == 0:
            write(options.out, result)


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
    # gloo's thread needs the interpreter to let go of the last operation's tensors. Where that is
    # ending already, the process aborts (PyTorch 2.13, its own wrapper as well).
    time.sleep(LAST_OPERATION_SECONDS)
    # Not after an error: the other ranks may wait where this one never comes.
    dist.destroy_process_group()


class TimedSteps:
    """Makes steps, one with each call, and remembers when each ended on this rank."""

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step = step
        self._device = device
        self.clock = clock_for(device)
        self._marks = [self.clock.mark()]

    def __call__(self) -> None:
        self._step()
        self._marks.append(self.clock.mark())

    def __len__(self) -> int:
        """Steps so far."""
        return len(self._marks) - 1

    def seconds(self) -> list[float]:
        """Of each step, on the slowest rank. All ranks must call it together."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        mine = [self.clock.seconds(*pair) for pair in pairwise(self._marks)]
        return slowest(mine, self._device)


def sent_bytes() -> int:
    """By this rank's host, over gloo's interface, since that was made; 0 where it is not known."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    counter = Path("/sys/class/net", name, "statistics/tx_bytes")
    return int(counter.read_text()) if name != "lo" and counter.exists() else 0


def peak_bytes(device: torch.device) -> int:
    """The most of a GPU's memory that tensors of this rank took since the last call; 0 on a
    processor.
    """
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def gradients(model: nn.Module) -> dict[str, int]:
    """How many they are, and their bytes."""
    sizes = gradient_sizes(model)
    return {"gradient_bytes": sum(sizes), "tensors": len(sizes)}


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
