"""Batches that differ: what a tuning gains from being told their complexity.

Simulated: ResNet-50 on 4 nodes of 2 ranks at 10 Gbit/s, whose steps compute for 0.25 to 2.2 times
as long, from step to step, as lengths that differ do. All ranks have equal lengths in a step, as
the balancing samplers give them. Tunings without the complexity, with it, and with a random number
in its place; a step's noise is 2 %. The figures:

- interval: the width of a trial's interval, in parts of a step; median of all trials;
- used: in how many tunings the service used what it was told;
- winner: in how many tunings something else than the default was kept;
- gain: how many times as fast all steps together became, in truth; median and least;
- steps: how long the tuning took; cost: the steps at the default that it lost.

Live: 2 ranks over gloo that sleep for 4 to 80 ms in each step, tuned by a real service.

Goals: with the complexity the interval of a trial is at most half as wide, simulated and live; the
simulated job becomes faster in every tuning; with the random number the median gain is not lower
than without by more than two hundredths.

    python benchmarks/complexity.py --json complexity.json
    python benchmarks/complexity.py --parts simulated --seeds 5
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from harness import print_table, write_json
from simulated_job import SimulatedJob

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views import every_trial
from bagua_client import DistributedDataParallel
from bagua_simulator import Cluster, Simulator
from bagua_simulator.workload import Workload
from bagua_simulator.workloads import load

LENGTHS = (0.25, 0.4, 0.6, 0.8, 1.0, 1.3, 1.7, 2.2)
NOISE = 0.02
MOST_STEPS = 3000
CLUSTER = Cluster(
    nodes=4,
    ranks_per_node=2,
    bandwidth_bytes_per_second=10e9 / 8,
    latency_seconds=100e-6,
    inside_bandwidth_bytes_per_second=800e9 / 8,
)
SECONDS_PER_TOKEN = 0.0002
PARTS = ("simulated", "live")
NARROWER, HARM = 0.5, 0.02
USED = "corrected to a batch complexity"
Told = Callable[[random.Random, float], float | None]
ARMS: dict[str, Told] = {
    "not told": lambda rng, length: None,
    "told": lambda rng, length: 1000 * length,
    "random": lambda rng, length: rng.random(),
}


def scaled(workload: Workload, factor: float) -> Workload:
    """With so many times the computing."""
    return replace(
        workload,
        forward_seconds=factor * workload.forward_seconds,
        ready_seconds=tuple(factor * seconds for seconds in workload.ready_seconds),
    )


def simulated(seeds: int) -> list[dict[str, Any]]:
    """Of each arm."""
    workload = load("resnet50")
    by_length = {length: Simulator(scaled(workload, length), CLUSTER) for length in LENGTHS}
    found = []
    for arm, told in ARMS.items():
        tunings = [_simulated(by_length, told, seed) for seed in range(seeds)]
        found.append(
            {
                "arm": arm,
                "interval": median(width for tuning in tunings for width in tuning["widths"]),
                "used": sum(tuning["is_used"] for tuning in tunings),
                "winners": sum(tuning["is_winner"] for tuning in tunings),
                "tunings": seeds,
                "gain": median(tuning["gain"] for tuning in tunings),
                "least_gain": min(tuning["gain"] for tuning in tunings),
                "steps": median(tuning["steps"] for tuning in tunings),
                "cost_steps": median(tuning["cost_steps"] for tuning in tunings),
            }
        )
    return found


def _simulated(by_length: dict[float, Simulator], told: Told, seed: int) -> dict[str, Any]:
    """One tuning."""
    lengths, rng = random.Random(seed), random.Random(seed + 1000)
    tuner = Tuner(Store("sqlite://"))
    job = SimulatedJob(tuner, by_length[1.0], "job", seed, noise=NOISE)
    while not job.is_finished and job.step < MOST_STEPS:
        length = lengths.choice(LENGTHS)
        job.simulator, job.complexity = by_length[length], told(rng, length)
        job.run(1)

    def seconds(configuration: Configuration) -> float:
        return fmean(each.step_seconds(configuration) for each in by_length.values())

    return {
        "widths": _widths(tuner.store, "job"),
        "is_used": any(USED in event.message for event in tuner.store.events("job")),
        "is_winner": job.configuration != job.baseline,
        "gain": seconds(job.baseline) / seconds(job.configuration),
        "steps": job.step,
        "cost_steps": job.lost_steps,
    }


def _widths(store: Store, job: str) -> list[float]:
    trials = every_trial(store, job)
    return [(t.high - t.low) / t.seconds for t in trials if t.seconds and t.low and t.high]


class _Sleeping(torch.nn.Module):
    """Computes for as long as its batch has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        time.sleep(SECONDS_PER_TOKEN * tokens)
        result: torch.Tensor = self.layers(x).sum()
        return result


def _rank(rank: int, folder: str, is_told: bool) -> None:
    """Train until the tuning has ended; rank 0 starts the service."""
    torch.set_num_threads(1)
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in settings.items()})
    os.environ.update(BAGUA_AUTOTUNE="1", BAGUA_AUTOTUNE_MAX_SAMPLES="6", XDG_DATA_HOME=folder)
    os.environ["BAGUA_AUTOTUNE_WARMUP_TIME_S"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = DistributedDataParallel(_Sleeping())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rng = random.Random(rank)
    while model.is_tuning:
        tokens = rng.randrange(20, 400)
        if is_told:
            model.report_complexity(tokens)
        model(torch.ones(1, 64), tokens).backward()
        optimizer.step()
    dist.destroy_process_group()


def live() -> list[dict[str, Any]]:
    """Without the complexity, and with it."""
    found = []
    for arm, is_told in (("not told", False), ("told", True)):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (folder, is_told), nprocs=2)
            store = Store(f"sqlite:///{folder}/bagua-autotune/autotune.db", as_found=True)
            (job,) = store.contacts()
            widths = _widths(store, job.id)
            store.close()
        found.append({"arm": arm, "interval": median(widths), "trials": len(widths)})
    return found


def misses(result: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The goals that were not met."""
    found = []
    for part, rows in result.items():
        by_arm = {row["arm"]: row for row in rows}
        if by_arm["told"]["interval"] > NARROWER * by_arm["not told"]["interval"]:
            found.append(f"{part}: the interval is not half as wide")
        if part == "simulated" and by_arm["told"]["least_gain"] <= 1:
            found.append("a tuning that was told did not make the job faster")
        if part == "simulated" and by_arm["random"]["gain"] < by_arm["not told"]["gain"] - HARM:
            found.append("a random complexity did harm")
    return found


def _print(part: str, rows: list[dict[str, Any]]) -> None:
    if part == "live":
        cells = [[row["arm"], f"{row['interval']:.3f}", str(row["trials"])] for row in rows]
        print_table(["live", "interval", "trials"], cells)
        return
    print_table(
        ["simulated", "interval", "used", "winner", "gain", "least", "steps", "cost"],
        [
            [
                row["arm"],
                f"{row['interval']:.3f}",
                f"{row['used']} of {row['tunings']}",
                f"{row['winners']} of {row['tunings']}",
                f"{row['gain']:.3f}",
                f"{row['least_gain']:.3f}",
                f"{row['steps']:.0f}",
                f"{row['cost_steps']:.1f}",
            ]
            for row in rows
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {}
    for part in options.parts:
        result[part] = simulated(options.seeds) if part == "simulated" else live()
        _print(part, result[part])
    missed = misses(result)
    for miss in missed:
        print(f"goal NOT met: {miss}")
    if options.json:
        write_json(options.json, result)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
