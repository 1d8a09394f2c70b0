"""PowerSGD where torch's hook would fail or cannot run: numbers, shapes, steps and ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import PowerSGDAlgorithm
from tests.client.algorithms.matrices import MatrixModel, image_loss
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


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
    [
        ("fp16", torch.float16, 1e-5, 0.01),
        ("bf16", torch.bfloat16, 1e-4, 0.05),
    ],
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


@pytest.mark.parametrize(
    "arguments",
    [
        {"matrix_approximation_rank": 0},
        {"start_powerSGD_iter": -1},
        {"min_compression_rate": 0},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused_where_they_are_given(
    arguments: dict[str, Any],
) -> None:
    with pytest.raises(ValueError, match="powersgd needs"):
        PowerSGDAlgorithm(**arguments)
