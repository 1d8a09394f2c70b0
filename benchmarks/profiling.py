"""The cost of recording a step on a GPU: steps with and without a record, in turns.

One process for each GPU trains a real model over NCCL; rank 0 records every other step as the
agent does, with an event for each gradient and for each bucket's begin and end. What it costs on
the CPU is a line of overhead.py.

    python benchmarks/profiling.py --models resnet50 --pairs 100
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from harness import compare, in_turns, print_table
from recut import hooked, recut
from stepping import REAL, WARM_UP_STEPS

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.measuring.clock import CudaClock
from bagua_client.measuring.profiler import Recording
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.tunable.timeline import Timeline

MIB = 1024 * 1024


def measure(rank: int, model: str, bucket_mib: int, pairs: int) -> tuple[list[float], list[float]]:
    """Step times of rank 0 in seconds, without and with a record."""
    device = torch.device("cuda", torch.cuda.current_device())
    kind, batch_size = REAL[model]
    wrapped = DistributedDataParallel(kind().to(device, memory_format=torch.channels_last))
    tunable = hooked(wrapped)
    inputs = kind.batch(batch_size, device)
    clock = CudaClock()

    def step(records: bool) -> float:
        wrapped.zero_grad(set_to_none=True)
        dist.barrier()
        torch.cuda.synchronize()
        timeline = Timeline(clock.mark) if records and rank == 0 else None
        tunable.observation.record(timeline)
        began = clock.mark()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = wrapped(*inputs)
        loss.backward()
        ended = clock.mark()
        torch.cuda.synchronize()
        if timeline is not None:
            _check(tunable, timeline, began, ended)
        return clock.seconds(began, ended)

    plain, recorded = partial(step, False), partial(step, True)
    in_turns(plain, plain, WARM_UP_STEPS)
    recut(wrapped, Configuration(bucket_bytes=bucket_mib * MIB), plain)
    in_turns(plain, recorded, WARM_UP_STEPS)
    return in_turns(plain, recorded, pairs)


def _check(
    tunable: TunableReducer,
    timeline: Timeline,
    began: torch.cuda.Event,
    ended: torch.cuda.Event,
) -> None:
    """A record that makes no sense would be a cheap one."""
    order, partition = tunable.order, tunable.layout.partition
    recording = Recording(0, 0, CudaClock(), timeline, began, ended, order)
    assert recording.is_known
    profile = recording.read()
    for bucket, indices in zip(profile.buckets, partition, strict=True):
        places = [order.index(index) for index in indices]
        last_ready = max(profile.ready_seconds[place] for place in places)
        assert 0 < last_ready <= bucket.started_seconds <= bucket.ended_seconds


def run_rank(rank: int, folder: str, world_size: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    torch.backends.cudnn.benchmark = True
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        device_id=torch.device("cuda", rank),
    )
    found = {
        f"{model}, {size} MiB": measure(rank, model, size, options.pairs)
        for model in options.models
        for size in options.buckets
    }
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(REAL), default=sorted(REAL))
    parser.add_argument("--buckets", nargs="+", type=int, default=[1, 25], help="sizes in MiB")
    parser.add_argument("--pairs", type=int, default=50)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    os.environ.pop("BAGUA_AUTOTUNE", None)
    world_size = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (folder, world_size, options), nprocs=world_size)
        found = json.loads(Path(folder, "found.json").read_text())
    rows = []
    for name, (plain, recorded) in found.items():
        cell = compare(plain, recorded)
        rows.append(
            [
                name,
                f"{cell.reference_seconds * 1e3:.2f}",
                f"{cell.other_seconds * 1e3:.2f}",
                f"{cell.paired_ratio:.4f} ({cell.low:.4f} to {cell.high:.4f})",
            ]
        )
    print_table(["model", "plain ms", "recorded ms", "ratio of pairs (95 %)"], rows)


if __name__ == "__main__":
    main()
