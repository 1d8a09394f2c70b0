"""The model that sleeps: its gradients and its times; narrower models; and models that compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_simulator.workload import Architecture, Layer
from bagua_simulator.workloads import CATALOG, architecture
from benchmarks.support.cells.cell import MODELS, grid
from benchmarks.support.workloads import computing, sleeping
from benchmarks.support.workloads.sleeping import (
    SleepingModel,
    SleepingTraining,
    gradient_value,
    scaled,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

# The first layer's "tied" is used again by the last one, which has no parameters of its own.
SMALL = Architecture(
    "small",
    (
        Layer((("tied", (4, 3)), ("positions", (2, 3))), 1.0),
        Layer((("weight", (3, 3)), ("bias", (3,))), 3.0),
        Layer((), 2.0),
    ),
    compute_seconds=0.9,
    late=("tied",),
)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    pool = RankPool([2])
    yield pool
    pool.close()


def _wrong_means(kind: str) -> list[str]:
    """Of some steps: the parameters whose gradient is not the mean over the ranks."""
    training = SleepingTraining("resnet50", 500_000, 0.001, dist.get_rank())
    training.model()
    model = training.model()
    wrapped: nn.Module = Stock(model) if kind == "stock" else DistributedDataParallel(model)
    wrong = []
    for step in range(1, 6):
        wrapped.zero_grad(set_to_none=True)
        (step * wrapped(torch.zeros((), requires_grad=True))).backward()
        for index, parameter in enumerate(model.parameters()):
            mean = step * sum(gradient_value(index, rank) for rank in (0, 1)) / 2
            if not torch.allclose(parameter.grad, torch.full_like(parameter, mean)):
                wrong.append(f"step {step}, parameter {index}")
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.reconfigure(Configuration(bucket_bytes=step * 65536, channels=2))
    return wrong


@pytest.mark.parametrize("kind", ["stock", "ours"])
def test_after_each_step_all_ranks_hold_the_mean(two_ranks: RankPool, kind: str) -> None:
    assert two_ranks.run(_wrong_means, kind) == [[], []]


@dataclass
class _Clock:
    """Stands in for ``time``: a sleep takes exactly its time, and nothing else takes any."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("busy_seconds", "expected"),
    [
        # The backward pass takes two thirds of the step, 0.1 s for each operation.
        (0.0, [0.8, 0.8, 0.9, 0.9]),
        # Late by less than the layer that follows takes: caught up.
        (0.04, [0.84, 0.88, 0.94, 0.98]),
        # Late by more: the layer that follows does not sleep.
        (0.2, [1.0, 1.2, 1.4, 1.6]),
    ],
)
def test_a_layer_is_done_at_its_moment_unless_it_is_late(
    monkeypatch: pytest.MonkeyPatch, busy_seconds: float, expected: list[float]
) -> None:
    clock = _Clock()
    monkeypatch.setattr(sleeping, "time", clock)
    model = SleepingModel(SMALL, rank=0)
    ready: list[float] = []

    def become_ready(_: torch.Tensor) -> None:
        clock.now += busy_seconds
        ready.append(clock.now)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(become_ready)
    output = model(torch.zeros((), requires_grad=True))
    assert clock.now == pytest.approx(0.3)
    output.backward()
    assert ready == pytest.approx(expected)


@pytest.mark.parametrize("gradient_bytes", [2_000_000, 20_000_000, 100_000_000])
@pytest.mark.parametrize("name", CATALOG)
def test_gradients_come_to_the_size_and_layers_stay(name: str, gradient_bytes: int) -> None:
    full = architecture(name)
    narrow = scaled(full, gradient_bytes)
    tensors = narrow.workload().tensors
    assert sum(tensor.bytes for tensor in tensors) == pytest.approx(gradient_bytes, rel=0.01)
    assert min(tensor.elements for tensor in tensors) >= 1
    assert [layer.operations for layer in narrow.layers] == [
        layer.operations for layer in full.layers
    ]
    assert narrow.workload().ready_seconds == full.workload().ready_seconds
    assert [t.name for t in tensors] == [t.name for t in full.workload().tensors]


def test_a_size_below_one_element_for_each_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="resnet50 cannot be scaled to 100 bytes"):
        scaled(architecture("resnet50"), 100)


# Products in bfloat16 are slow on processors that have no instructions for them: at full size a
# step takes minutes there.
SMALLER = {
    "resnet50": {"SIDE": 16, "STAGES": ((64, 1), (128, 1))},
    "bert-base": {"VOCABULARY": 100, "CONTEXT": 16, "SEQUENCE": 8, "WIDTH": 24, "LAYERS": 2},
    "gpt2-small": {"VOCABULARY": 100, "CONTEXT": 16, "WIDTH": 24, "LAYERS": 2},
}


@pytest.mark.parametrize("name", SMALLER)
def test_a_model_takes_a_step_that_gives_every_parameter_a_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _ = computing.MODELS[name]
    monkeypatch.setitem(computing.MODELS, name, (kind, 2))
    for constant, value in SMALLER[name].items():
        monkeypatch.setattr(kind, constant, value)
    workload = computing.ComputingTraining(name, torch.device("cpu"))
    model, again = workload.model(), workload.model()
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    workload.stepper(model)()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_the_models_are_of_their_published_sizes() -> None:
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in kind().parameters())
            for name, (kind, _) in computing.MODELS.items()
        }
    layers = architecture("resnet50").layers
    shapes = [shape for layer in layers for _, shape in layer.parameters]
    assert sizes["resnet50"] == sum(map(math.prod, shapes))
    assert sizes["vgg16"] == 138_357_544  # Simonyan and Zisserman 2015, table 2: 138 million
    # With what only pre-training has: BERT-base alone has 109 million.
    assert 109e6 < sizes["bert-base"] < 112e6
    assert sizes["gpt2-small"] == pytest.approx(124.4e6, rel=0.001)
    assert sizes["vit-base"] == pytest.approx(86.6e6, rel=0.001)  # Dosovitskiy et al. 2021: 86
    assert sizes["t5-base"] == pytest.approx(222.9e6, rel=0.001)  # Raffel et al. 2020: 220
    assert set(sizes) == set(MODELS)
    with pytest.raises(ValueError, match="no model vit-base on cpu"):
        grid(["vit-base"], ["unshaped"])
    assert grid(["vit-base"], ["unshaped"], device="cuda")
