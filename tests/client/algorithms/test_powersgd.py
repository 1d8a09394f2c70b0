"""Gradients as products of thin matrices: bit for bit torch's hook, and through every re-cut."""

from __future__ import annotations

import copy
import pickle
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
from bagua_client.reducer import carrier
from tests.client.algorithms.small import MatrixModel, TypedModel, image_loss
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


def test_what_a_step_lacks_comes_later_whatever_carries_the_buckets(three_ranks: RankPool) -> None:
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


def _on_a_narrow_wire(precision: str) -> tuple[float, torch.dtype]:
    """How far gradients of rank 2 are off the mean; the type in which errors are kept."""
    torch.manual_seed(1)
    model = nn.Linear(30, 40, bias=False)
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(2, 0))
    assert ours.reconfigure(Configuration(wire_precision=precision))
    given = [torch.randn(1, 30, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    mean = torch.zeros_like(model.weight)
    for inputs in given:
        mean += torch.autograd.grad(model(inputs).square().sum() / 2, [model.weight])[0]
    ours(given[dist.get_rank()]).square().sum().backward()
    assert model.weight.grad is not None
    (lost,) = ours.algorithm.state_dict()["lost"].values()
    return float((model.weight.grad - mean).norm() / mean.norm()), lost.dtype


@pytest.mark.parametrize(
    ("precision", "dtype", "least", "most"),
    [("fp16", torch.float16, 1e-5, 0.01), ("bf16", torch.bfloat16, 1e-4, 0.05)],
)
def test_factors_may_travel_in_16_bits(
    two_ranks: RankPool, precision: str, dtype: torch.dtype, least: float, most: float
) -> None:
    for off, kept in two_ranks.run(_on_a_narrow_wire, precision):
        assert least <= off < most, off
        assert kept == dtype


def _overflowing() -> list[bool]:
    """Whether gradients of each step are finite, whose P is too large for 16 bits once Q has the
    direction of the rows: 2 ranks times 60,000 over the root of 3."""
    torch.manual_seed(0)
    model = nn.Linear(256, 3, bias=False).half()
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(start_powerSGD_iter=0))
    found = []
    for _ in range(2):
        ours.zero_grad()
        (2165 * ours(torch.ones(1, 256, dtype=torch.float16)).float()).sum().backward()
        assert model.weight.grad is not None
        found.append(bool(model.weight.grad.isfinite().all()))
    return found


def test_factors_that_overflow_are_infinite_gradients_and_no_zeros(two_ranks: RankPool) -> None:
    assert two_ranks.run(_overflowing) == [[True, False]] * 2


class _Odd(nn.Module):
    """Of all shapes that parameters may have; the last layer is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.ones(1, 1))
        self.tall = nn.Linear(1, 37, bias=False)
        self.wide = nn.Linear(37, 11)
        self.turned = nn.Parameter(torch.randn(24, 11).t())
        convolution = nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last)
        self.convolution = convolution
        self.without_effect = nn.Linear(24, 18)
        self.unused = nn.Linear(24, 18)
        self.now_and_then = nn.Linear(24, 24)

    def forward(self, inputs: torch.Tensor, uses: bool) -> torch.Tensor:
        found = self.wide(self.tall(inputs[:, :1]) * self.scale + self.one).tanh() @ self.turned
        found = self.now_and_then(found) if uses else found
        images = self.convolution(inputs.view(-1, 3, 4, 4)).square().mean()
        nothing = self.empty.sum() + 0.0 * self.without_effect(found).sum()
        return found.square().mean() + images + nothing


def _of_odd_shapes(rank: int) -> tuple[list[str], list[str]]:
    """Parameters whose gradients are not finite, or wrong; and those that were compressed."""
    model = _Odd()
    algorithm = PowerSGDAlgorithm(rank, 0)
    ours = DistributedDataParallel(model, algorithm=algorithm, find_unused_parameters=True)
    inputs = torch.randn(6, 48, generator=torch.Generator().manual_seed(dist.get_rank()))
    totals = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    wrong = []
    for step in range(120):
        uses = step % 20 > 9
        used = {n: p for n, p in model.named_parameters() if n.partition(".")[0] != "unused"}
        if not uses:
            used = {n: p for n, p in used.items() if not n.startswith("now")}
        found = torch.autograd.grad(model(inputs, uses), list(used.values()))
        ours.zero_grad()
        ours(inputs, uses).backward()
        for (name, parameter), gradient in zip(used.items(), found, strict=True):
            assert parameter.grad is not None
            if not parameter.grad.isfinite().all():
                wrong.append(f"{name}: not finite in step {step}")
            totals[name] += parameter.grad
            expected[name] += gradient
    for name, mean in expected.items():
        dist.all_reduce(mean.div_(dist.get_world_size()))
        # The error of the last step, and what was taken up in steps that did not use it.
        room = 0.3 if name.startswith("now") else 0.1
        if float((totals[name] - mean).norm()) > room * float(mean.norm()):
            wrong.append(f"{name}: {float((totals[name] - mean).norm() / mean.norm()):.2f} off")
    return wrong, list(ours.algorithm.state_dict()["starts"])


@pytest.mark.parametrize("rank", [1, 8])
def test_all_shapes_train_and_what_is_not_used_does_no_harm(two_ranks: RankPool, rank: int) -> None:
    for wrong, compressed in two_ranks.run(_of_odd_shapes, rank):
        assert wrong == []
        if rank < 8:
            assert {"wide.weight", "turned", "convolution.weight"} <= set(compressed)
        assert not {"scale", "empty", "one", "tall.weight", "wide.bias"} & set(compressed)


def _with_a_sparse_gradient() -> tuple[list[int], list[bool]]:
    """The phase in each step, and whether gradients of the embedding are the mean."""
    torch.manual_seed(0)
    embedding, layer = nn.Embedding(20, 16, sparse=True), nn.Linear(16, 16)
    model = nn.Sequential(embedding, layer)
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(start_powerSGD_iter=2))
    phases, right = [], []
    for _ in range(4):
        ours.zero_grad()
        phases.append(ours.algorithm.phase)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        ours(torch.tensor([rank, 7])).sum().backward()
        assert embedding.weight.grad is not None
        mean = embedding.weight.grad.to_dense()
        shares = (mean.abs().sum(1) / mean.abs().sum(1).max()).tolist()
        right.append(shares[:ranks] == [1 / ranks] * ranks and shares[7] == 1.0)
    return phases, right


def test_sparse_gradients_are_summed_and_their_steps_count(two_ranks: RankPool) -> None:
    for phases, right in two_ranks.run(_with_a_sparse_gradient):
        assert phases == [1, 1, 2, 2]
        assert right == [True] * 4


def _warms_up() -> tuple[list[bool], list[bool], bool]:
    """Whether it does before each step; whether the gradient after it is that of all ranks as it
    is; and whether what a tuning would try does."""
    torch.manual_seed(0)
    model = nn.Linear(30, 40, bias=False)
    ours = DistributedDataParallel(model, algorithm=PowerSGDAlgorithm(start_powerSGD_iter=2))
    warms_up, is_whole = [], []
    for step in range(4):
        warms_up.append(ours.algorithm.is_warming_up)
        ours.zero_grad()
        given = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
        ours(given).square().sum().backward()
        (own,) = torch.autograd.grad(model(given).square().sum(), [model.weight])
        assert model.weight.grad is not None
        is_whole.append(torch.allclose(model.weight.grad, own, atol=1e-3))
    offered = PowerSGDAlgorithm.offered([model.weight])
    assert offered is not None
    return warms_up, is_whole, offered.is_warming_up


def test_a_tuning_waits_for_its_first_steps_and_tries_it_without(two_ranks: RankPool) -> None:
    for warms_up, is_whole, tried in two_ranks.run(_warms_up):
        assert warms_up == is_whole == [True, True, False, False]
        assert not tried


def _comes_back() -> tuple[list[tuple[str, bool]], bool]:
    """What is in force after each change, and whether its first steps are to come; and of another
    model that has the same instance."""
    algorithm = PowerSGDAlgorithm(start_powerSGD_iter=4)
    ours = DistributedDataParallel(MatrixModel(), algorithm=algorithm)
    seen = []
    for name in ("", "bytegrad", "", "bytegrad", ""):
        assert ours.reconfigure(Configuration(3000, algorithm=name))
        image_loss(ours, 0).backward()
        seen.append((ours.algorithm.name, ours.algorithm.is_warming_up))
        for _ in range(2):
            image_loss(ours, 0).backward()
    other = DistributedDataParallel(MatrixModel(), algorithm=algorithm)
    return seen, other.algorithm.is_warming_up


def test_its_first_steps_are_not_made_again_after_a_trial_of_another(two_ranks: RankPool) -> None:
    for seen, other in two_ranks.run(_comes_back):
        own, others = ("powersgd", True), ("bytegrad", False)
        # Three steps, one, and none.
        assert seen == [own, others, ("powersgd", False), others, ("powersgd", False)]
        assert other


def test_an_instance_goes_to_processes_that_have_no_group_yet() -> None:
    algorithm = PowerSGDAlgorithm(4, warm_start=False, hierarchical=True)
    for found in (copy.deepcopy(algorithm), pickle.loads(pickle.dumps(algorithm))):
        assert found.state.matrix_approximation_rank == 4
        assert (found.state.warm_start, found.hierarchical) == (False, True)
