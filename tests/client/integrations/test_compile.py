"""torch.compile of the inner module and of the wrapper: as often as stock, however often re-cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from tests.client.comparison import difference
from tests.ranks import RankPool

WIDTH = 256
"""A layer's gradient has 256 KiB; torch splits a compiled wrapper's graph at 1 MiB first."""
CONFIGURATIONS = [
    Configuration(1),
    Configuration(600_000, "leaders"),
    Configuration(25 << 20, "shards", channels=2),
    Configuration(300_000, channels=4),
]


class _Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values).relu()
        return values


def _train(what: str) -> tuple[str | None, int, int]:
    """The first difference, and the graphs that were compiled under torch's class and ours."""
    torch._dynamo.reset()
    plain = _Net()
    twin = copy.deepcopy(plain)
    backends = _Counting(), _Counting()
    stock, ours = Stock(plain, bucket_cap_mb=1), DistributedDataParallel(twin, bucket_cap_mb=1)
    models: list[Any] = [stock, ours]
    if what == "wrapper":
        models = [torch.compile(m, backend=b) for m, b in zip(models, backends, strict=True)]
    else:
        for model, backend in zip(models, backends, strict=True):
            model.module.compile(backend=backend)
    torch.manual_seed(dist.get_rank())
    found = None
    for step in range(16):
        if step % 4 == 3:
            assert ours.reconfigure(CONFIGURATIONS[step // 4])
        inputs = torch.randn(4, WIDTH)
        for model in models:
            model.zero_grad()
            model(inputs).square().mean().backward()
        found = found or difference(stock, ours, f"step {step}")
    return found, *(backend.graphs for backend in backends)


@pytest.mark.parametrize("what", [pytest.param("module", marks=pytest.mark.slow), "wrapper"])
def test_a_compiled_model_trains_as_stock_and_is_compiled_as_often(
    four_ranks: RankPool, what: str
) -> None:
    for found, stock_graphs, our_graphs in four_ranks.run(_train, what):
        assert found is None
        assert our_graphs == stock_graphs > 0
