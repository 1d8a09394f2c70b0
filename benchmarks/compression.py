"""The speed of compression to 8 bits, compared with a copy, and whether GPU and CPU agree.

    python benchmarks/compression.py                     # on the GPU, if there is one
    python benchmarks/compression.py --device cpu

Bytes are counted as each must move them: compressing reads the numbers twice (once for their
minimum and maximum; ranges once) and writes a byte for each; decompressing reads a byte of each of
two rows and writes a number; a copy reads and writes each number. What is compared takes turns;
medians. On a GPU ten run as one graph; "us of one" is a single call between two events, with what
the host takes to launch it. A GPU's bytes are compared with the CPU's, over random chunks of all
kinds.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from harness import print_table, write_json

from bagua_client.compression import RANGE_ELEMENTS, compress, compressed_bytes, decompress
from bagua_client.compression.minmax_uint8 import HEADER_BYTES

ROWS = 2
REPEATS = 10
GOAL, GOAL_MEBIBYTES = 0.7, 25


def replayed(work: Callable[[], object]) -> Callable[[], object]:
    """On a GPU, ``REPEATS`` in a graph: the host's share in launching them takes no part."""
    work()  # compiles what it needs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    return graph.replay


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """One run of ``work``, on the device's own clock."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def speeds(mebibytes: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Of a copy, of compressing and of decompressing as many bytes of float32, in turns."""
    elements = mebibytes * 1024 * 1024 // 4 // ROWS
    chunks = torch.randn(ROWS, elements, device=device)
    other, total = torch.empty_like(chunks), torch.empty(elements, device=device)
    packed = torch.empty((ROWS, compressed_bytes(elements)), dtype=torch.uint8, device=device)
    ranged = compress(chunks, range_elements=RANGE_ELEMENTS)
    works: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: other.copy_(chunks), 2 * chunks.nbytes),
        "compress": (lambda: compress(chunks, packed), 2 * chunks.nbytes + packed.nbytes),
        "decompress": (lambda: decompress(packed, total, 2.0), packed.nbytes + total.nbytes),
        "compress, ranges": (
            lambda: compress(chunks, ranged, RANGE_ELEMENTS),
            chunks.nbytes + ranged.nbytes,
        ),
        "decompress, ranges": (
            lambda: decompress(ranged, total, 2.0, RANGE_ELEMENTS),
            ranged.nbytes + total.nbytes,
        ),
    }
    on_gpu = device.type == "cuda"
    runs = {name: replayed(work) if on_gpu else work for name, (work, _) in works.items()}
    repeats = REPEATS if on_gpu else 1
    taken: dict[str, list[float]] = {name: [] for name in works}
    launched: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 3):
        for name, (work, _) in works.items():
            seconds, alone = seconds_of(runs[name], device) / repeats, seconds_of(work, device)
            if turn >= 3:
                taken[name].append(seconds)
                launched[name].append(alone)
    rates = {name: [works[name][1] / s / 1e9 for s in taken[name]] for name in works}
    copied = median(rates["copy"])
    return [
        {
            "mebibytes": mebibytes,
            "what": name,
            "microseconds": median(taken[name]) * 1e6,
            "microseconds_of_one": median(launched[name]) * 1e6,
            "gigabytes_per_second": median(rates[name]),
            "quartiles": quantiles(rates[name])[::2],
            "of_copy": median(rates[name]) / copied,
        }
        for name in works
    ]


def random_chunk(choose: random.Random) -> torch.Tensor:
    """Of any length, scale and offset; seldom with a number that is not finite."""
    elements = choose.choice((1, 31, 32, 33, 4096, 4097, choose.randrange(1, 300_000)))
    chunk = torch.randn(choose.choice((1, 2, 3)), elements)
    chunk = chunk * 10.0 ** choose.uniform(-12, 12)
    if choose.random() < 0.3:
        chunk = chunk + 10.0 ** choose.uniform(-3, 12)
    if choose.random() < 0.1:
        chunk[0, choose.randrange(elements)] = choose.choice((float("nan"), float("inf")))
    return chunk.to(choose.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)))


def disagreements(chunks: int, device: torch.device) -> dict[str, int]:
    """Of so many random chunks, by their type: those of which the device makes other bytes, or
    other numbers of the same bytes, than the CPU. One NaN is as good as another."""
    found: dict[str, int] = {}
    choose = random.Random(0)
    torch.manual_seed(0)
    for _ in range(chunks):
        chunk = random_chunk(choose)
        ranges = choose.choice((None, 1024, RANGE_ELEMENTS))
        here = compress(chunk, None, ranges)
        there = compress(chunk.to(device), None, ranges).cpu()
        both = here, there
        first = here.shape[1] - math.ceil(chunk.shape[1] / HEADER_BYTES) * HEADER_BYTES
        divisor = choose.choice((None, 3.0))
        ours, theirs = torch.empty_like(chunk[0]), torch.empty_like(chunk[0], device=device)
        decompress(here, ours, divisor, ranges)
        decompress(here.to(device), theirs, divisor, ranges)
        each, others = torch.empty_like(chunk), torch.empty_like(chunk, device=device)
        decompress(here, each, None, ranges)
        decompress(here.to(device), others, None, ranges)
        name = str(chunk.dtype)
        bytes_differ = not (
            torch.equal(here[:, first:], there[:, first:])
            and _same(*(packed[:, :first].contiguous().view(chunk.dtype) for packed in both))
        )
        found[name] = found.get(name, 0) + bytes_differ
        is_same = _same(ours, theirs.cpu()) and _same(each, others.cpu())
        found[f"{name} back"] = found.get(f"{name} back", 0) + (not is_same)
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(), other.nan_to_num()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 10, 25, 100, 400])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--chunks", type=int, default=1000, help="random chunks to compare with the CPU's"
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    rows = [row for size in options.mebibytes for row in speeds(size, options.rounds, device)]
    header = ["MiB", "what", "us", "us of one", "GB/s", "quartiles", "of a copy"]
    print_table(
        header,
        [
            [
                str(row["mebibytes"]),
                row["what"],
                f"{row['microseconds']:.1f}",
                f"{row['microseconds_of_one']:.1f}",
                f"{row['gigabytes_per_second']:.1f}",
                "{:.1f} to {:.1f}".format(*row["quartiles"]),
                f"{row['of_copy']:.2f}",
            ]
            for row in rows
        ],
    )
    if name == "cuda":
        least = min(row["of_copy"] for row in rows if row["mebibytes"] >= GOAL_MEBIBYTES)
        word = "met" if least >= GOAL else "MISSED"
        print(
            f"{word}: {GOAL} of a copy's bytes per second from {GOAL_MEBIBYTES} MiB on: {least:.3f}"
        )
    result: dict[str, Any] = {"benchmark": "compression", "device": name, "speeds": rows}
    if name == "cuda":
        result["chunks"], result["other"] = options.chunks, disagreements(options.chunks, device)
        print(f"of {options.chunks} random chunks differ from the CPU's: {result['other']}")
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
