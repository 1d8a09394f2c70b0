"""Convergence under each algorithm and with 16 bits on the wire, compared with plain averaging.

The examples' trainings run with each of them, several seeds each.

    torchrun --nproc-per-node 4 benchmarks/convergence.py --json all.json
    torchrun --nproc-per-node 2 benchmarks/convergence.py --ways all_reduce bf16 fp16
    torchrun --nproc-per-node 2 benchmarks/convergence.py --device cuda --steps 500 --seeds 5
    python benchmarks/convergence.py --network 100mbit --trainings characters --plot build/curves
    python benchmarks/convergence.py --network 10gbit --gpus 0 0 --device cuda --trainings sources \
        --ways all_reduce bf16 bytegrad powersgd --steps 1500 --seeds 1 --plot build/curves

"loss" is that of the last steps' batches, "accuracy" that on images, or text, that were not trained
on, with replicas that trained apart averaged first; means over all ranks. qadam is an optimizer of
its own, so it stands beside "adam": the same, whose warm-up never ends. With a network the ranks
are on emulated hosts, two on each. "To the first one's loss" is how long it takes to the loss that
the first way ends with, and 2 % more.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.converging.curves import came_to, draw
from benchmarks.support.converging.trainings import TRAININGS, Figures
from benchmarks.support.converging.ways import Way
from benchmarks.support.harness import print_table, write_json
from benchmarks.testbed import Network, Testbed

AS_LOW = 1.02
TIMEOUT_SECONDS = 6 * 3600.0
HOSTS, RANKS_OF_A_HOST = 2, 2
BESIDE = {"qadam": "adam", "qadam, compatible": "adam"}
"""What a way is compared with, where that is not all-reduce."""
ROOM = {"low_precision_decentralized": 2.0, "async": 2.0}
"""Per cent that accuracy may fall by; else 1."""

Found = dict[str, dict[str, list[Figures]]]
"""By training, by way: of each seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trainings", nargs="+", choices=[*TRAININGS], default=["digits", "characters"]
    )
    parser.add_argument("--ways", nargs="+", choices={*Way.NAMES, *Way.OF_SHARDS})
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.0,
                        help="factor for the learning rates of SGD and AdamW")  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                        help="cuda: each rank has its own GPU and uses NCCL")  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the losses there")
    parser.add_argument("--network", help="of emulated hosts, such as 100mbit; without torchrun")
    parser.add_argument("--gpus", nargs="+", metavar="GPU",
                        help="of each emulated host, which may share one (0 0)")  # fmt: skip
    options = parser.parse_args()
    if options.network and "RANK" not in os.environ:
        sys.exit(on_hosts(options))
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    found = train(options)
    if dist.get_rank() == 0:
        report(found)
        for name, by_way in found.items() if options.plot else ():
            file = options.plot / f"convergence-{name.replace(', ', '-')}.png"
            draw(file, by_way, ", ".join(filter(None, [name, options.network])))
    dist.destroy_process_group()


def on_hosts(options: argparse.Namespace) -> int:
    """Run this program on emulated hosts; its exit code."""
    network, gpus = Network.parse(options.network), options.gpus
    hosts, ranks = (len(gpus), 1) if gpus else (HOSTS, RANKS_OF_A_HOST)
    with Testbed(network, hosts, ranks, ordinary_priority=True, gpus=gpus or False) as testbed:
        if testbed.fallback:
            print(f"over loopback: {testbed.fallback}", flush=True)
        return testbed.start([__file__, *sys.argv[1:]]).wait(TIMEOUT_SECONDS)


def train(options: argparse.Namespace) -> Found:
    device = options.device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    found: Found = {}
    for name in options.trainings:
        possible = Way.OF_SHARDS if name.endswith("sharded") else Way.NAMES
        found[name] = {way: [] for way in options.ways or possible if way in possible}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for way, figures in found[name].items():  # in turn
                each = Way(way, options.steps, options.rate)
                figures.append(TRAININGS[name](seed, each, device))
                if options.json and dist.get_rank() == 0:
                    write_json(options.json, found)  # Each time: the whole takes hours.
    return found


def report(found: Found) -> None:
    rows = []
    for name, by_way in found.items():
        for way, seeds in by_way.items():
            row = [name, way]
            for figure in ("loss", "accuracy, %"):
                values = [seed[figure] for seed in seeds]
                row.append(f"{fmean(values):.4g} ({min(values):.4g} to {max(values):.4g})")
            reached = came_to(seeds, AS_LOW * fmean(s["loss"] for s in next(iter(by_way.values()))))
            row.append("never" if reached is None else "{} steps, {:.0f} s".format(*reached))
            rows.append([*row, *_verdict(way, by_way)])
    header = ["training", "way", "loss: mean (range)", "accuracy, %", "to the first one's loss"]
    header += ["beside", "points", "met"]
    print_table(header, rows)


def _verdict(way: str, by_way: dict[str, list[Figures]]) -> list[str]:
    """What it is compared with, by how many points its accuracy is off, and whether it may."""
    other = BESIDE.get(way, "all_reduce")
    if other not in by_way or way in (other, "adam"):
        return ["", "", ""]
    ours, theirs = (fmean(seed["accuracy, %"] for seed in by_way[it]) for it in (way, other))
    is_met = ours >= theirs - ROOM.get(way, 1.0)
    return [other, f"{ours - theirs:+.2f}", "yes" if is_met else "no"]


if __name__ == "__main__":
    main()
