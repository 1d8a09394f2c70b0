"""What is measured in a cell, as jobs/measure.py reads it, and how long."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bagua_client import Configuration
from benchmarks.testbed import Network

from .cell import Cell

KIB, MIB = 1024, 1024 * 1024
Arm = dict[str, Any]

STOCK_DEFAULT = "stock default"
COMPUTE = "compute"
TUNED = "tuned"
TUNED_ALLOWED = "tuned, 16 bits allowed"
COMPRESSED = "torch's bf16 hook"
"""Stock DDP at its default with torch's own hook that sends gradients in 16 bits."""
WAYS = {"off": "flat", "leaders": "leaders", "shards": "shards"}
"""Values of the knob ``hierarchical`` and how arms name them."""
BAGUA_DEFAULT = "flat 10 MiB"
"""Ours at 10 MiB, Bagua's default bucket size."""

FLOW_SIZES, FLOW_CHANNELS = (5 * MIB, 25 * MIB), (2, 4)
"""Swept too where one connection gets a share of the link only."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        sizes_bytes: of the sweep's buckets.
        channels: of each size of the sweep.
        stock_mib: bucket sizes of stock DDP, beside its default.
        sweep_rounds, sweep_steps: blocks of each arm in stage 1, and measured steps of each.
        run_off_rounds, run_off_steps: the same in stage 2.
        finalists: how many of the fastest of the sweep stage 2 measures again at least.
        most_finalists: so many, if the sweep cannot tell more of them apart.
        most_tuning_steps: a tuning that has not ended by then is cut off.
        tuning_variables: environment of the tuned job.
        allow: what BAGUA_AUTOTUNE_ALLOW lists in a second tuning; empty: there is none.
    """

    sizes_bytes: tuple[int, ...] = (
        128 * KIB, 512 * KIB, MIB, 2 * MIB, 5 * MIB, 10 * MIB, 25 * MIB, 50 * MIB,
    )  # fmt: skip
    channels: tuple[int, ...] = (1,)
    stock_mib: tuple[int, ...] = (1, 5, 10, 50)
    sweep_rounds: int = 3
    sweep_steps: int = 2
    run_off_rounds: int = 6
    run_off_steps: int = 4
    finalists: int = 3
    most_finalists: int = 6
    most_tuning_steps: int = 600
    tuning_variables: Mapping[str, str] = field(default_factory=dict)
    allow: str = ""

    def to_json(self) -> dict[str, Any]:
        """As it is read back from a file."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


FULL = Effort()
ON_GPUS = Effort(
    sizes_bytes=(MIB, 5 * MIB, 10 * MIB, 25 * MIB, 50 * MIB, 100 * MIB),
    channels=(1, 2, 4, 8),
    stock_mib=(5, 10, 50, 100),
    sweep_rounds=1,
    sweep_steps=2,
    run_off_rounds=4,
    run_off_steps=2,
    most_finalists=3,
    most_tuning_steps=300,
)
"""Little for each of many: a machine with GPUs is rarely had for hours."""
SMOKE = Effort(
    sizes_bytes=(512 * KIB, 10 * MIB),
    stock_mib=(1,),
    sweep_rounds=1,
    sweep_steps=1,
    run_off_rounds=2,
    run_off_steps=1,
    finalists=1,
    most_finalists=2,
    most_tuning_steps=400,
    tuning_variables={
        "BAGUA_AUTOTUNE_MAX_SAMPLES": "3",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.5",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S": "1",
    },
)
"""Enough to see that every part works; its figures mean nothing."""


def sweep_arms(cell: Cell, effort: Effort) -> list[Arm]:
    """Stock DDP at its default and other sizes, computing alone, and all of our sweep; on GPUs
    torch's hook for 16 bits too."""
    arms: list[Arm] = [
        {"name": STOCK_DEFAULT, "kind": "stock", "bucket_mib": None},
        {"name": COMPUTE, "kind": "compute"},
    ]
    arms += [
        {"name": f"stock {size} MiB", "kind": "stock", "bucket_mib": size}
        for size in effort.stock_mib
    ]
    if cell.device == "cuda":
        arms.append({"name": COMPRESSED, "kind": "compressed"})
    swept = [(size, channels) for channels in effort.channels for size in effort.sizes_bytes]
    if Network.parse(cell.network).flow_bits_per_second:
        more = [(size, channels) for channels in FLOW_CHANNELS for size in FLOW_SIZES]
        swept += [pair for pair in more if pair not in swept]
    ways = list(WAYS) if cell.is_hierarchical else ["off"]
    for way in ways:
        for size, channels in swept:
            configuration = Configuration(size, way, channels)
            name = f"{WAYS[way]} {describe_bytes(size)}"
            name += f", {channels} channels" if channels > 1 else ""
            arms.append(ours(name, configuration.to_json()))
    return arms


def ours(name: str, configuration: Mapping[str, Any]) -> Arm:
    """An arm of the client's own DistributedDataParallel."""
    return {"name": name, "kind": "ours", "configuration": dict(configuration)}


def is_swept(arm: Arm) -> bool:
    """Whether the arm is one of the sweep of our configurations."""
    return arm["kind"] == "ours" and arm["name"] not in (TUNED, TUNED_ALLOWED)


def describe_bytes(size_bytes: int) -> str:
    """``128 KiB``, ``5 MiB``."""
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // KIB} KiB"
