"""The memory, threads and open files of a rank for each number of channels.

    torchrun --nproc-per-node 2 benchmarks/channels.py                   # gloo, on CPUs
    torchrun --nproc-per-node 2 benchmarks/channels.py --device cuda     # NCCL, a GPU for each rank

Then switches between them, and after so many (``--switches``) what one channel holds again: threads
and files that grow have leaked; resident memory wanders, and has leaked if it grows for ever.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import print_table, write_json
from models import GradientList, resnet50_shapes
from recut import hooked
from stepping import list_step

from bagua_client import Configuration, DistributedDataParallel

CHANNELS = (1, 2, 4, 8, 16)
SETTLING_STEPS = 3
ENDING_SECONDS = 2.0
"""So long threads of a group that is gone take to end, at most."""


@dataclass(frozen=True)
class Held:
    """By this rank.

    Attributes:
        gpu_bytes: of its GPU, whoever asked for them: NCCL's own do not count as torch's.
    """

    after: str
    gpu_bytes: int
    resident_bytes: int
    threads: int
    files: int


def held(after: str, device: torch.device) -> Held:
    free, total = torch.cuda.mem_get_info() if device.type == "cuda" else (0, 0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        after=after,
        gpu_bytes=total - free,
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        threads=len(list(Path("/proc/self/task").iterdir())),
        files=len(list(Path("/proc/self/fd").iterdir())),
    )


def measure(device: torch.device, switches: Sequence[int]) -> list[Held]:
    wrapped = DistributedDataParallel(GradientList(resnet50_shapes()).to(device))
    tunable = hooked(wrapped)
    step = list_step(device)

    def run(channels: int) -> None:
        assert wrapped.reconfigure(Configuration(channels=channels))
        for _ in range(SETTLING_STEPS):
            step(wrapped)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def at_rest() -> None:
        run(1)
        dist.barrier()
        tunable.communicator.release(wrapped.configuration)
        gc.collect()
        time.sleep(ENDING_SECONDS)

    found = []
    for channels in CHANNELS:
        run(channels)
        found.append(held(f"{channels} channels" if channels > 1 else "1 channel", device))
    at_rest()
    found.append(held("1 channel, groups let go", device))
    draw, made = random.Random(0), 0
    for count in switches:
        for _ in range(count):
            run(draw.choice(CHANNELS))
        at_rest()
        made += count
        found.append(held(f"{made} switches, groups let go", device))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--switches", type=int, nargs="+", default=[25, 25], metavar="N")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    found = measure(device, options.switches)
    if dist.get_rank() == 0:
        mib = 1024 * 1024
        rows = [
            [it.after, f"{it.gpu_bytes / mib:.0f}", f"{it.resident_bytes / mib:.0f}",
             str(it.threads), str(it.files)]
            for it in found
        ]  # fmt: skip
        print_table(["after", "GPU MiB", "resident MiB", "threads", "open files"], rows)
        if options.json:
            write_json(options.json, [asdict(it) for it in found])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
