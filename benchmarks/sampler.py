"""Samplers that balance the ranks: how even a step is, how long an epoch takes, what is learnt.

Evenness: the slowest rank's cost over the mean of the ranks', summed over the steps of an epoch, by
sampler, random level and batch size; of 4,096 log-normal lengths and of the job's own.

The job: a small GPT learns functions of Python's standard library (examples/source_code.py), one at
a time and in batches, on ranks that have a core each: on a shared core, a rank that waits lends its
core to the slower one, and nothing is lost. Each way to feed it has a model of its own in the same
processes, and they take turns, epoch by epoch. The loss is that of functions that none has seen.

Goals: at level 0, the slowest takes at most 1 % more than the mean; one at a time, an epoch is at
least 1.2x faster than with DistributedSampler, and the mean loss over the seeds is not above that
of DistributedSampler by more than its range.

    python benchmarks/sampler.py --json sampler.json
    python benchmarks/sampler.py --ranks 2 --seeds 1 --epochs 2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from harness import compare, print_table, write_json
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from source_code import BATCH, Functions, filled_up, limited, loss_of, model

from bagua_client import DistributedDataParallel
from bagua_client.data import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

TRAINED, HELD_OUT = 512, 128
STOCK = "DistributedSampler"
OURS = "load-balancing sampler"
BY_SIZE = "load-balancing batch sampler"
KINDS = {"one at a time": (STOCK, OURS), "batches": (STOCK, OURS, BY_SIZE)}
LEVELS = (0.0, 0.1, 0.5, 1.0)
MOST_UNEVEN, LEAST_GAIN = 1.01, 1.2
PARTS = ("evenness", "job")

Loader = DataLoader[Any]


def log_normal(number: int = 4096) -> list[float]:
    """Lengths of about 50, whose logarithms have a standard deviation of 0.7."""
    normal = torch.randn(number, generator=torch.Generator().manual_seed(0))
    return (50 * (0.7 * normal).exp()).round().add(1).tolist()


def slowest_over_mean(of_ranks: Sequence[Sequence[int]], lengths: list[float], batch: int) -> float:
    """1: all ranks have the same cost in each step."""
    costs = torch.tensor([[lengths[index] for index in rank] for rank in of_ranks])
    steps = costs[:, : costs.shape[1] // batch * batch].unflatten(1, (-1, batch)).sum(2)
    return float(steps.max(0).values.sum() / steps.mean(0).sum())


def evenness(ranks: int) -> list[dict[str, Any]]:
    """Of each sampler and level, by batch size, for both kinds of lengths."""
    own = [float(len(sample)) for sample in samples()[0]]
    found = []
    for name, lengths in {"log-normal": log_normal(), "the job's": own}.items():
        everything: Any = range(len(lengths))
        by_chance = [list(DistributedSampler(everything, ranks, rank)) for rank in range(ranks)]
        ways: dict[str, Sequence[Sequence[int]]] = {STOCK: by_chance}
        for level in LEVELS:
            sampler = LoadBalancingDistributedSampler(
                everything, None, ranks, 0, random_level=level, complexities=lengths
            )
            ways[f"{OURS}, level {level:g}"] = sampler.of_all_ranks()
        for way, of_ranks in ways.items():
            ratios = {batch: slowest_over_mean(of_ranks, lengths, batch) for batch in (1, BATCH)}
            found.append({"lengths": name, "sampler": way, "slowest_over_mean": ratios})
    return found


def samples() -> tuple[list[Tensor], list[Tensor]]:
    """To train on, and held out; prepared, so that only the training takes time."""
    functions = [*map(Functions(TRAINED + HELD_OUT).__getitem__, range(TRAINED + HELD_OUT))]
    order = torch.randperm(len(functions), generator=torch.Generator().manual_seed(0)).tolist()
    return [functions[i] for i in order[:TRAINED]], [functions[i] for i in order[TRAINED:]]


class Way:
    """One way to feed the job, with a model that all ways begin with.

    Args:
        batch: of samples, where the batches do not go by size.
    """

    def __init__(self, name: str, data: list[Tensor], batch: int, seed: int) -> None:
        dataset: Any = data
        self.sampler: Any
        lengths = [float(len(sample)) for sample in data]
        if name == STOCK:
            self.sampler = DistributedSampler(dataset, seed=seed)
        else:
            self.sampler = LoadBalancingDistributedSampler(dataset, seed=seed, complexities=lengths)
        options: dict[str, Any] = {"batch_size": batch, "sampler": self.sampler}
        if name == BY_SIZE:
            cut = limited(lengths, 10 / 8 * batch * fmean(lengths))
            options = {"batch_sampler": LoadBalancingDistributedBatchSampler(self.sampler, cut)}
        self.loader: Loader = DataLoader(dataset, collate_fn=filled_up, **options)
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def epoch(self, number: int) -> float:
        """Seconds, of the slowest rank."""
        self.sampler.set_epoch(number)
        dist.barrier()
        begin = time.perf_counter()
        for batch in self.loader:
            self.optimizer.zero_grad()
            loss_of(self.model, batch).backward()
            self.optimizer.step()
        dist.barrier()
        return time.perf_counter() - begin

    @torch.no_grad()
    def loss(self, held_out: list[Tensor]) -> float:
        """Of a character, the same on all ranks."""
        total = torch.zeros(2)
        for sample in held_out[dist.get_rank() :: dist.get_world_size()]:
            number = len(sample) - 1
            total += torch.tensor(
                [float(loss_of(self.model.module, sample[None])) * number, number]
            )
        dist.all_reduce(total)
        return float(total[0] / total[1])


def cores() -> list[int]:
    """One processor of each core that this process may use; those of one core share its units."""
    found: dict[str, int] = {}
    for processor in sorted(os.sched_getaffinity(0)):
        file = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        found.setdefault(file.read_text() if file.exists() else str(processor), processor)
    return list(found.values())


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    os.sched_setaffinity(0, {cores()[rank]})
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks)
    trained, held_out = (each[: options.samples] for each in samples())
    found = []
    for kind, names in KINDS.items():
        rows: dict[str, dict[str, Any]] = {
            name: {"kind": kind, "way": name, "seconds": [], "losses": []} for name in names
        }
        for seed in range(options.seeds):
            batch = BATCH if kind == "batches" else 1
            ways = {name: Way(name, trained, batch, seed) for name in names}
            for epoch in range(options.epochs):
                for name in names[:: 1 if epoch % 2 else -1]:
                    rows[name]["seconds"].append(ways[name].epoch(epoch))
            for name, way in ways.items():
                rows[name]["losses"].append(way.loss(held_out))
                rows[name]["steps"] = len(way.loader)
        found += rows.values()
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def job(options: argparse.Namespace) -> list[dict[str, Any]]:
    """By kind and way: the seconds of all epochs, and the loss of each seed."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (options, folder), nprocs=options.ranks)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    return rows


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each way beside DistributedSampler."""
    stock = {row["kind"]: row for row in rows if row["way"] == STOCK}
    found = []
    for row in rows:
        reference = stock[row["kind"]]
        ratio = compare(row["seconds"], reference["seconds"])
        worse = fmean(row["losses"]) - fmean(reference["losses"])
        noise = max(reference["losses"]) - min(reference["losses"])
        gain = {"gain": ratio.paired_ratio, "low": ratio.low, "high": ratio.high}
        found.append({**row, **gain, "loss_above_stock": worse, "loss_range_of_stock": noise})
    return found


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def print_evenness(rows: list[dict[str, Any]]) -> None:
    print_table(
        ["slowest over mean", "lengths", "batch 1", f"batch {BATCH}"],
        [
            [
                row["sampler"],
                row["lengths"],
                *(f"{x:.3f}" for x in row["slowest_over_mean"].values()),
            ]
            for row in rows
        ],
    )


def print_job(rows: list[dict[str, Any]]) -> None:
    print_table(
        [
            "way",
            "functions",
            "steps",
            "epoch s",
            "range",
            "faster",
            "95 %",
            "loss",
            "range",
            "above",
        ],
        [
            [
                row["way"],
                row["kind"],
                str(row["steps"]),
                f"{median(row['seconds']):.2f}",
                _range(row["seconds"]),
                f"{row['gain']:.2f}x",
                f"{row['low']:.2f} to {row['high']:.2f}",
                f"{fmean(row['losses']):.3f}",
                f"{min(row['losses']):.3f} to {max(row['losses']):.3f}",
                f"{row['loss_above_stock']:+.3f}",
            ]
            for row in rows
        ],
    )


def failures(result: dict[str, Any]) -> list[str]:
    """The goals that are missed."""
    found = [
        f"{row['sampler']} on {row['lengths']} lengths: {row['slowest_over_mean'][1]:.3f}"
        for row in result.get("evenness", [])
        if row["sampler"].endswith("level 0") and row["slowest_over_mean"][1] > MOST_UNEVEN
    ]
    for row in result.get("job", []):
        if (row["kind"], row["way"]) != ("one at a time", OURS):
            continue
        if row["gain"] < LEAST_GAIN:
            found.append(f"{OURS}: {row['gain']:.2f}x")
        # A single seed has no range.
        if row["loss_above_stock"] > row["loss_range_of_stock"] and len(row["losses"]) > 1:
            found.append(f"{OURS}: loss {row['loss_above_stock']:+.3f}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=TRAINED, help="of the job, at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if "job" in options.parts and len(cores()) < options.ranks:
        parser.error(
            f"{options.ranks} ranks need a core each, and there are {len(cores())}: see --ranks"
        )
    result: dict[str, Any] = {"options": {"ranks": options.ranks, "epochs": options.epochs}}
    if "evenness" in options.parts:
        result["evenness"] = evenness(options.ranks)
        print_evenness(result["evenness"])
    if "job" in options.parts:
        result["job"] = judged(job(options))
        print_job(result["job"])
    missed = failures(result)
    print("goals met" if not missed else "goals NOT met: " + "; ".join(missed))
    if options.json:
        write_json(options.json, result)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
