"""Gradients as products of thin matrices: bit for bit torch's hook, and through every re-cut."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import PowerSGDAlgorithm
from bagua_client.reducer import carrier
from tests.client.algorithms.matrices import MatrixModel, TypedModel, image_loss
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS, BEGIN = 14, 3
ONE, SEVERAL = 10.0, 3000 / 2**20
"""MiB of a bucket."""


def _in_order(state, bucket):  # type: ignore[no-untyped-def]  # Torch would read text.
    """Torch's hook, one bucket after the other: over gloo the callbacks of two change places."""
    arrival = powerSGD_hook(state, bucket)
    arrival.wait()
    return arrival


def _other_steps(
    mib: float, ranks: list[int], options: dict[str, Any], dtype: torch.dtype
) -> list[str]:
    """Where a gradient, or what is kept, is not that of torch's hook, bit for bit."""
    wrong = []
    for rank in ranks:
        given = {"matrix_approximation_rank": rank, "start_powerSGD_iter": BEGIN, **options}
        stock = Stock(TypedModel(dtype), bucket_cap_mb=mib)  # type: ignore[arg-type]
        theirs = PowerSGDState(None, **given)
        stock.register_comm_hook(theirs, _in_order)
        algorithm = PowerSGDAlgorithm(**given)
        ours = DistributedDataParallel(TypedModel(dtype), bucket_cap_mb=mib, algorithm=algorithm)
        own = ours.algorithm
        assert isinstance(own, PowerSGDAlgorithm)
        for step in range(STEPS):
            for model in (stock, ours):
                model.zero_grad()
                image_loss(model, step).backward()
            pairs = zip(stock.parameters(), ours.parameters(), strict=True)
            if not all(torch.equal(a.grad, b.grad) for a, b in pairs):  # type: ignore[arg-type]
                wrong.append(f"rank {rank}: the gradients of step {step}")
                break
            for parameter in (*stock.parameters(), *ours.parameters()):
                parameter.data.sub_(parameter.grad, alpha=0.05)  # type: ignore[arg-type]
        if own.state.compression_stats() != theirs.compression_stats() or own.state.iter != STEPS:
            wrong.append(f"rank {rank}: the statistics")
        assert 0 < theirs.compression_stats()[2] < theirs.compression_stats()[1]
        assert (len(theirs.error_dict) > 2) is (mib == SEVERAL) or not theirs.use_error_feedback
    return wrong


@pytest.mark.parametrize(
    ("pool", "mib", "ranks", "options", "dtype"),
    [
        ("two_ranks", ONE, [1, 4], {}, torch.float32),
        ("four_ranks", SEVERAL, [4], {}, torch.float32),
        ("two_ranks", ONE, [2], {"use_error_feedback": False}, torch.float16),
        # Torch's hook forgets what buckets on their way hold, if there are several.
        ("two_ranks", ONE, [4], {"warm_start": False}, torch.bfloat16),
        (
            *("two_ranks", ONE, [2]),
            {"warm_start": False, "use_error_feedback": False, "start_powerSGD_iter": 0},
            torch.float32,
        ),
        ("four_ranks", ONE, [2], {"batch_tensors_with_same_shape": True}, torch.float64),
        ("two_ranks", ONE, [4], {"min_compression_rate": 0.5, "random_seed": 7}, torch.float32),
    ],
)
def test_gradients_are_those_of_torchs_hook_bit_for_bit(
    request: pytest.FixtureRequest,
    pool: str,
    mib: float,
    ranks: list[int],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    processes: RankPool = request.getfixturevalue(pool)
    for wrong in processes.run(_other_steps, mib, ranks, options, dtype):
        assert wrong == []


def _not_accounted_for(configurations: list[Configuration]) -> tuple[float, float, bool]:
    """By how much all gradients that steps got, and what error feedback has yet to add, differ from
    all means of the ranks' gradients; how much of these it has yet to add; and whether all ranks
    have got the same bits. Shares of the norm of the whole."""
    model, ranks = MatrixModel(), dist.get_world_size()
    algorithm = PowerSGDAlgorithm(2, start_powerSGD_iter=0)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    owed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    got = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    is_same = True
    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", 256):
        for step, configuration in enumerate(configurations * 2):
            assert ours.reconfigure(configuration)
            for part in range(3):
                ours.zero_grad()
                for rank in range(ranks):
                    loss = image_loss(model, 3 * step + part, rank) / ranks
                    found = torch.autograd.grad(loss, list(model.parameters()))
                    for total, gradient in zip(owed.values(), found, strict=True):
                        total.add_(gradient)
                image_loss(ours, 3 * step + part).backward()
                for total, parameter in zip(got.values(), model.parameters(), strict=True):
                    assert parameter.grad is not None
                    total.add_(parameter.grad)
                    other = parameter.grad.clone()
                    dist.broadcast(other, 0)
                    is_same = is_same and torch.equal(other, parameter.grad)
    own = ours.algorithm
    kept = own.state_dict()["lost"]
    for value in kept.values():
        dist.all_reduce(value.div_(ranks))
    whole = _norm(owed)
    off = _norm({name: owed[name] - got[name] - kept[name] for name in owed})
    return off / whole, _norm(kept) / whole, is_same


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([tensor.reshape(-1) for tensor in tensors.values()]).norm())


WAYS = [
    Configuration(3000, channels=4),
    Configuration(500, "leaders", channels=2),
    Configuration(20_000, "shards"),
    Configuration(),
    Configuration(3000, "shards", channels=2),
]


def test_what_a_step_lacks_comes_later_whatever_carries_the_buckets(
    three_ranks: RankPool,
) -> None:
    for off, left, is_same in three_ranks.run(_not_accounted_for, WAYS):
        assert is_same
        assert off < 1e-5, "gradients are lost"
        assert 0.01 < left < 0.3, "much is compressed, and most of it is there"


def _off_the_mean(configuration: Configuration, dtype: torch.dtype) -> tuple[float, bool, float]:
    """With factors that are no approximation: how far gradients are off the mean; whether ranks
    have the same bits; how much larger what travels is than the gradients."""
    model, ranks = TypedModel(dtype), dist.get_world_size()
    algorithm = PowerSGDAlgorithm(64, 1, min_compression_rate=0.01, use_error_feedback=False)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    assert ours.reconfigure(configuration)
    worst, is_same = 0.0, True
    for step in range(4):
        parameters = list(model.parameters())
        means = [torch.zeros_like(parameter) for parameter in parameters]
        for rank in range(ranks):
            loss = image_loss(model, step, rank) / ranks
            found = torch.autograd.grad(loss, parameters)
            for mean, gradient in zip(means, found, strict=True):
                mean.add_(gradient)
        ours.zero_grad()
        image_loss(ours, step).backward()
        for mean, parameter in zip(means, parameters, strict=True):
            assert parameter.grad is not None
            off = (parameter.grad - mean).abs().max() / mean.abs().max()
            worst = max(worst, float(off))
            other = parameter.grad.clone()
            dist.broadcast(other, 0)
            is_same = is_same and torch.equal(other, parameter.grad)
    state = ours.algorithm.state  # type: ignore[attr-defined]
    return worst, is_same, 1 / state.compression_stats()[0]


@pytest.mark.parametrize(
    ("hierarchical", "channels", "dtype", "off"),
    [
        ("off", 4, torch.float64, 1e-12),
        ("leaders", 1, torch.float32, 1e-4),
        ("shards", 4, torch.float64, 1e-12),
    ],
)
def test_factors_of_full_rank_give_the_mean_in_all_ways(
    four_ranks: RankPool, hierarchical: str, channels: int, dtype: torch.dtype, off: float
) -> None:
    way = Configuration(3000, hierarchical, channels)
    for worst, is_same, share in four_ranks.run(_off_the_mean, way, dtype):
        assert is_same
        assert worst < off
        assert share > 1, "all matrices were made of factors"
