"""The cached dataset: the cost of a hit, and the time saved in an epoch.

Hits: one process reads samples in a random order, from each backend, from a Redis server as one
would use it by hand (``pickle`` and ``GET``), and from torch's own ``TensorDataset``, which has all
of them in this process; from ``redis`` also a batch at once, as DataLoader does. In turns, rounds
of 500 reads; median and MB/s.

Epochs: 2 ranks of 2 workers, each sample takes 20 ms (slept). Goals: with each backend, the second
epoch takes at most a fifth of the first, and reads every sample from the cache; each sample is
loaded once.

    python benchmarks/cache.py --json cache.json
    python benchmarks/cache.py --parts hits --rounds 5
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import redis
import torch
import torch.distributed as dist
from harness import print_table, write_json
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from bagua_client.data import CachedDataset
from bagua_client.data.redis_server import OwnServer

BACKENDS = ("memory", "disk", "redis")
SHAPES = {"1 KiB": (256,), "588 KiB": (3, 224, 224)}
SAMPLES = 200
READS = 500
BATCH = 20
EPOCH_SAMPLES = 1600
LOAD_SECONDS = 0.02
LEAST_GAIN = 5.0
PARTS = ("hits", "epochs")


class Slept(Dataset[torch.Tensor]):
    """Samples that take a while, as those do that are read from far or decoded."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LOAD_SECONDS)
        return torch.full((256,), float(index))

    def __len__(self) -> int:
        return EPOCH_SAMPLES


def cached(dataset: Dataset[Any], backend: str, name: str, folder: str) -> CachedDataset[Any]:
    options: dict[str, Any] = {"capacity_per_node": 2**30}
    if backend == "disk":
        options["folder"] = folder
    return CachedDataset(dataset, backend, name, **options)


def hits(rounds: int, folder: str) -> list[dict[str, Any]]:
    """Microseconds for each sample read, by size and arm."""
    server = OwnServer("127.0.0.1", 2**30)
    found = []
    for size, shape in SHAPES.items():
        tensors = torch.rand(SAMPLES, *shape)
        arms = _arms(tensors, size, folder, redis.Redis(**server.host))
        times: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(rounds):
            order = random.Random(number).sample(list(arms), len(arms))
            for arm in order:
                times[arm].append(_seconds_per_read(arms[arm]))
        for arm, seconds in times.items():
            megabytes = tensors[0].nbytes / 1e6
            found.append(
                {
                    "sample": size,
                    "arm": arm,
                    "microseconds": median(seconds) * 1e6,
                    "megabytes_per_second": megabytes / median(seconds),
                }
            )
    server.stop()
    return found


def _arms(
    tensors: torch.Tensor, size: str, folder: str, client: Any
) -> dict[str, Callable[[list[int]], Any]]:
    """How each reads samples, which all of them have."""
    plain = TensorDataset(tensors)
    datasets = {backend: cached(plain, backend, size, folder) for backend in BACKENDS}
    for index in range(SAMPLES):
        # Torch pickles the whole storage of a view, here all samples.
        client.set(f"{size} {index}", pickle.dumps((tensors[index].clone(),)))
        for dataset in datasets.values():
            assert torch.equal(dataset[index][0], tensors[index])
    for dataset in datasets.values():
        dataset.cache_loader.flush()
    one_by_one = {
        "TensorDataset": plain.__getitem__,
        **{backend: dataset.__getitem__ for backend, dataset in datasets.items()},
        "Redis by hand": lambda index: pickle.loads(client.get(f"{size} {index}")),
    }
    return {
        **{arm: partial(_read_each, read) for arm, read in one_by_one.items()},
        f"redis, {BATCH} at once": partial(_read_batches, datasets["redis"].__getitems__),
    }


def _read_each(read: Callable[[int], Any], indices: list[int]) -> None:
    for index in indices:
        read(index)


def _read_batches(read: Callable[[list[int]], Any], indices: list[int]) -> None:
    for begin in range(0, len(indices), BATCH):
        read(indices[begin : begin + BATCH])


def _seconds_per_read(read: Callable[[list[int]], Any]) -> float:
    indices = random.Random(0).choices(range(SAMPLES), k=READS)
    begin = time.perf_counter()
    read(indices)
    return (time.perf_counter() - begin) / READS


def _rank(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for backend in ("none", *BACKENDS):
        dataset: Dataset[torch.Tensor] = Slept()
        if backend != "none":
            dataset = cached(dataset, backend, "epochs", folder)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset)
        loader = DataLoader(
            dataset, BATCH, sampler=sampler, num_workers=2, multiprocessing_context="fork"
        )
        seconds = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            dist.barrier()
            begin = time.perf_counter()
            for _ in loader:
                pass
            dist.barrier()  # As long as the slower rank.
            seconds.append(time.perf_counter() - begin)
        counted = dataset.cache_loader.statistics if isinstance(dataset, CachedDataset) else (0, 0)
        results.put((backend, rank, seconds, tuple(counted)))


def epochs(folder: str) -> list[dict[str, Any]]:
    """Seconds of two epochs, and what both ranks read from the cache and loaded."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = torch.multiprocessing.spawn(_rank, (folder, results), nprocs=2, join=False)
    answers = [results.get() for _ in range(2 * (1 + len(BACKENDS)))]
    while not ranks.join():
        pass
    return [
        {
            "backend": backend,
            "seconds": [max(a[2][epoch] for a in answers if a[0] == backend) for epoch in range(2)],
            "hits": sum(a[3][0] for a in answers if a[0] == backend),
            "misses": sum(a[3][1] for a in answers if a[0] == backend),
        }
        for backend in ("none", *BACKENDS)
    ]


def meets(row: dict[str, Any]) -> bool:
    first, second = row["seconds"]
    once = row["hits"] == row["misses"] == EPOCH_SAMPLES
    return bool(once and second * LEAST_GAIN <= first)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "hits" in options.parts:
            result["hits"] = hits(options.rounds, folder)
            print_table(
                ["a sample read", "from", "us", "MB/s"],
                [
                    [
                        row["sample"],
                        row["arm"],
                        f"{row['microseconds']:.1f}",
                        f"{row['megabytes_per_second']:.0f}",
                    ]
                    for row in result["hits"]
                ],
            )
        is_met = True
        if "epochs" in options.parts:
            result["epochs"] = epochs(folder)
            print_table(
                ["backend", "epoch 1 s", "epoch 2 s", "hits", "loaded"],
                [
                    [
                        row["backend"],
                        *(f"{seconds:.2f}" for seconds in row["seconds"]),
                        str(row["hits"]),
                        str(row["misses"]),
                    ]
                    for row in result["epochs"]
                ],
            )
            is_met = all(meets(row) for row in result["epochs"] if row["backend"] != "none")
            print("goals met" if is_met else "goals NOT met")
    if options.json:
        write_json(options.json, result)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
