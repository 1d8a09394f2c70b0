"""What a cell is: a model, a network, hosts and ranks; what is measured in it, how long, and which
arms the results rest on, so that the run-off measures them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bagua_client import Configuration
from bagua_simulator.workloads import architecture
from benchmarks.support.harness import Spread
from benchmarks.testbed import Network

SLEPT_MODELS = ("resnet50", "vgg16", "bert-base", "gpt2-small")
MODELS = (*SLEPT_MODELS, "vit-base", "t5-base")
"""Those that GPUs compute; of the first ones a processor can sleep the time."""
DEFAULT_MODELS = ("resnet50", "vgg16", "bert-base")
DEFAULT_NETWORKS = ("300mbit", "1gbit", "1gbit-2ms", "unshaped")
DEFAULT_GRADIENT_BYTES = 20_000_000
DEFAULT_COMPUTE_SECONDS = 0.3
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
class Cell:
    """One model on one network.

    Attributes:
        network: as the testbed writes it, such as ``1gbit-2ms``.
        gradient_bytes: all gradients of a step, of the scaled model.
        compute_seconds: forward and backward of a step, slept; a real workload has its own.
        smoke: small and short, to see that every part works; its figures mean nothing.
        run: 1, or the number of the repetition.
    """

    model: str
    network: str
    nodes: int = 2
    ranks_per_node: int = 2
    gradient_bytes: int = DEFAULT_GRADIENT_BYTES
    compute_seconds: float = DEFAULT_COMPUTE_SECONDS
    device: str = "cpu"
    smoke: bool = False
    run: int = 1

    @property
    def place(self) -> str:
        """What repetitions have in common: ``resnet50-1gbit-2x2``, and what is not as usual."""
        words = [self.model, self.network, f"{self.nodes}x{self.ranks_per_node}"]
        if self.device != "cpu":
            words.append(self.device)
        if self.smoke:  # always of one size
            return "-".join(["smoke", *words])
        if self.gradient_bytes != DEFAULT_GRADIENT_BYTES:
            words.append(f"{self.gradient_bytes / 1e6:g}mb")
        if self.compute_seconds != DEFAULT_COMPUTE_SECONDS:
            words.append(f"{self.compute_seconds:g}s")
        return "-".join(words)

    @property
    def name(self) -> str:
        """The name of its files."""
        return self.place if self.run == 1 else f"{self.place}-run{self.run}"

    @property
    def is_hierarchical(self) -> bool:
        """Whether reducing inside each node first means anything."""
        return self.nodes > 1 and self.ranks_per_node > 1

    @property
    def scale(self) -> float:
        """The gradients over those of the published model."""
        if self.device != "cpu":
            return 1.0
        tensors = architecture(self.model).workload().tensors
        return self.gradient_bytes / sum(tensor.bytes for tensor in tensors)

    @property
    def workload(self) -> dict[str, Any]:
        """The part of a job's specification that all rank programs read."""
        return {
            "workload": self.model,
            "gradient_bytes": self.gradient_bytes,
            "compute_seconds": self.compute_seconds,
            "device": self.device,
            "seed": self.run - 1,
        }

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Cell:
        return cls(**{key: value for key, value in values.items() if key != "name"})


def grid(
    models: Sequence[str], networks: Sequence[str], repeat: int = 1, **fields: Any
) -> list[Cell]:
    """Every model on every network, ``repeat`` times.

    Raises:
        ValueError: there is no such model or network.
    """
    for model in models:
        device = fields.get("device", "cpu")
        known = MODELS if device == "cuda" else SLEPT_MODELS
        if model not in known:
            raise ValueError(f"there is no model {model} on {device}; there are {', '.join(known)}")
    return [
        Cell(model, str(Network.parse(network)), run=run, **fields)
        for run in range(1, repeat + 1)
        for network in networks
        for model in models
    ]


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
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.2",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.3",
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


STOCK_DEFAULT_BYTES = 25 * MIB
BAGUA_DEFAULT_BYTES = 10 * MIB

Times = Mapping[str, Spread]
"""Step times of the sweep, by the arm's name."""


def run_off_arms(arms: Sequence[Arm], times: Times, cell: Cell, effort: Effort) -> list[Arm]:
    """What stage 2 measures: the finalists of the sweep and all that results compare."""
    wanted = {
        STOCK_DEFAULT,
        COMPUTE,
        BAGUA_DEFAULT,
        COMPRESSED,
        TUNED,
        TUNED_ALLOWED,
        best_stock(arms, times),
        scaled_stock_default(arms, cell),
        scaled_bagua_default(arms, cell),
        best_flat(arms, times),
        best_hierarchical(arms, times),
        *finalists(arms, times, effort),
    }
    return [arm for arm in arms if arm["name"] in wanted]


def finalists(arms: Sequence[Arm], times: Times, effort: Effort) -> list[str]:
    """The fastest of our sweep, and those that may be as fast: the lower end of their interval is
    at most the median of the last of the fastest."""
    ranked = _ranked((arm["name"] for arm in arms if is_swept(arm)), times)
    last = times[ranked[: effort.finalists][-1]].seconds
    close = [name for name in ranked if times[name].low <= last]
    return close[: effort.most_finalists]


def best_stock(arms: Sequence[Arm], times: Times) -> str:
    """Stock DDP at the size that is fastest in the sweep; its default is one of them."""
    return _ranked((arm["name"] for arm in arms if arm["kind"] == "stock"), times)[0]


def scaled_stock_default(arms: Sequence[Arm], cell: Cell) -> str:
    """Stock DDP with about as many buckets as its default makes of the published model."""
    sizes = {
        arm["name"]: (arm["bucket_mib"] or STOCK_DEFAULT_BYTES / MIB) * MIB
        for arm in arms
        if arm["kind"] == "stock"
    }
    return _nearest(sizes, STOCK_DEFAULT_BYTES * cell.scale)


def scaled_bagua_default(arms: Sequence[Arm], cell: Cell) -> str:
    """The same of ours at Bagua's default size."""
    sizes = {
        arm["name"]: arm["configuration"]["bucket_bytes"]
        for arm in arms
        if is_swept(arm) and Configuration.from_json(arm["configuration"]).is_torchs_way
    }
    return _nearest(sizes, BAGUA_DEFAULT_BYTES * cell.scale)


def best_flat(arms: Sequence[Arm], times: Times) -> str:
    """The fastest flat one of our sweep."""
    return _ranked((a["name"] for a in arms if is_swept(a) and not is_hierarchical(a)), times)[0]


def best_hierarchical(arms: Sequence[Arm], times: Times) -> str | None:
    """The fastest of our sweep that reduces inside each node first; None if there is none."""
    names = [arm["name"] for arm in arms if is_swept(arm) and is_hierarchical(arm)]
    return _ranked(names, times)[0] if names else None


def is_hierarchical(arm: Arm) -> bool:
    """Whether an arm of ours reduces inside each node first."""
    return bool(arm["configuration"]["hierarchical"] != "off")


def _ranked(names: Iterable[str], times: Times) -> list[str]:
    return sorted(names, key=lambda name: times[name].seconds)


def _nearest(sizes_bytes: Mapping[str, float], wanted_bytes: float) -> str:
    """By ratio."""
    return min(sizes_bytes, key=lambda name: abs(math.log(sizes_bytes[name] / wanted_bytes)))
