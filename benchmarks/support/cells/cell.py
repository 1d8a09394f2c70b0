"""What a cell is: a model, a network, hosts and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bagua_simulator.workloads import architecture
from benchmarks.testbed import Network

MODELS = ("resnet50", "vgg16", "bert-base", "gpt2-small")
DEFAULT_MODELS = ("resnet50", "vgg16", "bert-base")
DEFAULT_NETWORKS = ("300mbit", "1gbit", "1gbit-2ms", "unshaped")
DEFAULT_GRADIENT_BYTES = 20_000_000
DEFAULT_COMPUTE_SECONDS = 0.3


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
        if model not in MODELS:
            raise ValueError(f"there is no model {model}; there are {', '.join(MODELS)}")
    return [
        Cell(model, str(Network.parse(network)), run=run, **fields)
        for run in range(1, repeat + 1)
        for network in networks
        for model in models
    ]
