"""The model that sleeps: its gradients, the order in which they come, and its times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_simulator.workload import Architecture, Layer
from benchmarks.support.workloads import sleeping
from benchmarks.support.workloads.sleeping import SleepingModel, SleepingTraining, gradient_value
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
