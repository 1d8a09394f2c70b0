"""Gradients as products of thin matrices: bit for bit those of torch's hook, and through re-cuts."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import PowerSGDAlgorithm
from bagua_client.communication.low_rank import LowRankSum
from bagua_client.reducer import carrier
from tests.ranks import RankPool

STEPS, BEGIN = 14, 3
RANKS = [1, 2, 4, 8]
ONE, SEVERAL = 10.0, 3000 / 2**20
"""MiB of a bucket."""


class _Model(nn.Module):
    """Matrices of one shape, of others and with four dimensions, which become ready in another
    order than they are listed in, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(17, 5)
        self.inner = nn.ModuleList(nn.Linear(36, 36) for _ in range(3))
        self.narrow = nn.Linear(36, 17, bias=False)
        self.convolution = nn.Conv2d(3, 9, 3)
        self.norm = nn.LayerNorm(36)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.convolution(images).flatten(1)
        for layer in self.inner:
            found = self.norm(layer(found).tanh())
        wanted: torch.Tensor = self.last(self.narrow(found).tanh())
        return wanted


def _loss(model: nn.Module, step: int, rank: int | None = None) -> torch.Tensor:
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    images = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return model(images).square().mean()


def _in_order(state, bucket):  # type: ignore[no-untyped-def]  # Torch would read text.
    """Torch's hook, one bucket after the other: over gloo the callbacks of two change places."""
    arrival = powerSGD_hook(state, bucket)
    arrival.wait()
    return arrival


def _other_steps(mib: float, ranks: list[int], options: dict[str, Any]) -> list[str]:
    """Where a gradient, or what is kept, is not that of torch's hook, bit for bit."""
    wrong = []
    for rank in ranks:
        given = {"matrix_approximation_rank": rank, "start_powerSGD_iter": BEGIN, **options}
        stock = Stock(_Model(), bucket_cap_mb=mib)  # type: ignore[arg-type]
        theirs = PowerSGDState(None, **given)
        stock.register_comm_hook(theirs, _in_order)
        algorithm = PowerSGDAlgorithm(**given)
        ours = DistributedDataParallel(_Model(), bucket_cap_mb=mib, algorithm=algorithm)
        own = ours.algorithm
        assert isinstance(own, PowerSGDAlgorithm)
        for step in range(STEPS):
            for model in (stock, ours):
                model.zero_grad()
                _loss(model, step).backward()
            pairs = zip(stock.parameters(), ours.parameters(), strict=True)
            if not all(torch.equal(a.grad, b.grad) for a, b in pairs):  # type: ignore[arg-type]
                wrong.append(f"rank {rank}: the gradients of step {step}")
                break
            for parameter in (*stock.parameters(), *ours.parameters()):
                parameter.data.sub_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]
        lost = sorted(v for flat in own._lost._flats.values() for v in flat.tolist())
        if lost != sorted(v for flat in theirs.error_dict.values() for v in flat.tolist()):
            wrong.append(f"rank {rank}: the error")
        starts = sorted(v for flat in own._starts._flats.values() for v in flat.tolist())
        kept = sorted(v for flat in theirs.q_memory_dict.values() for v in flat.tolist())
        if given.get("warm_start", True) and starts != kept:
            wrong.append(f"rank {rank}: Q")
        if own.state.compression_stats() != theirs.compression_stats() or own.state.iter != STEPS:
            wrong.append(f"rank {rank}: the statistics")
        assert 0 < theirs.compression_stats()[2] < theirs.compression_stats()[1]
    return wrong


@pytest.mark.parametrize("mib", [ONE, SEVERAL], ids=["one bucket", "several buckets"])
@pytest.mark.parametrize("pool", ["two_ranks", "three_ranks", "four_ranks"])
def test_gradients_are_those_of_torchs_hook_bit_for_bit(
    request: pytest.FixtureRequest, pool: str, mib: float
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for wrong in ranks.run(_other_steps, mib, RANKS, {}):
        assert wrong == []


@pytest.mark.parametrize(
    "options",
    [
        {"use_error_feedback": False},
        # Torch's hook forgets what buckets on their way hold, if there are several.
        {"warm_start": False},
        {"warm_start": False, "use_error_feedback": False, "start_powerSGD_iter": 0},
        {"batch_tensors_with_same_shape": True},
        {"min_compression_rate": 0.5, "random_seed": 7},
    ],
    ids=str,
)
def test_so_they_are_with_each_argument(four_ranks: RankPool, options: dict[str, Any]) -> None:
    for wrong in four_ranks.run(_other_steps, ONE, [2, 4], options):
        assert wrong == []
