"""Trainings in which a user-written algorithm must do what torch's wrapper does."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client.algorithms import ByteGradAlgorithm
from bagua_compat.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua_compat.torch_api.data_parallel import DistributedDataParallel
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS = 4


class Averages(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return AveragesImpl(process_group)


class AveragesImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: Any) -> None:
        bucket.append_centralized_synchronous_op(group=self.process_group)


class OfOneOfBaguas(ByteGradAlgorithm):
    """Takes its arguments, and does something else."""

    def reify(self, process_group: Any) -> AlgorithmImpl:  # type: ignore[override]
        return AveragesImpl(process_group)


def _model() -> Any:
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    return small_model()


def _weights_of(*models: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for model in models for p in model.parameters()])


def _two_in_one_pass() -> float:
    """By how much two models, trained by one loss and one optimizer, differ from torch's."""
    found = []
    for wrap in (
        lambda model, optimizer: model.with_bagua([optimizer], Averages()),
        lambda model, _: nn.parallel.DistributedDataParallel(model),
    ):
        models = [_model() for _ in range(2)]
        parameters = [p for model in models for p in model.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        wrapped = [wrap(model, optimizer) for model in models]  # type: ignore[no-untyped-call]
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = [loss_of(w, dist.get_rank(), step + i) for i, w in enumerate(wrapped)]
            sum(losses, torch.zeros(())).backward()
            optimizer.step()
        found.append(_weights_of(*models))
    return float((found[0] - found[1]).abs().max())


def test_two_models_in_one_backward_pass_do_not_meet(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_two_in_one_pass)) < 1e-6


class Branches(nn.Module):
    """The first rank uses one branch, the others the other one; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(7, 5) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.branches[min(dist.get_rank(), 1)](x)
        return found


def _with_unused() -> tuple[float, list[float]]:
    """By how much gradients differ from torch's; those of the branch that nobody uses."""
    _model()
    stock = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
    ours = DistributedDataParallel(Branches(), find_unused_parameters=True, algorithm=Averages())
    difference = 0.0
    for step in range(STEPS):
        for model in (stock, ours):
            model.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
        for expected, found in zip(stock.parameters(), ours.parameters(), strict=True):
            if expected.grad is not None:
                assert found.grad is not None
                difference = max(difference, float((expected.grad - found.grad).abs().max()))
    of_nobody = ours.module.branches[2].weight.grad  # type: ignore[index,union-attr]
    assert of_nobody is not None
    return difference, of_nobody.unique().tolist()


def test_parameters_that_a_rank_does_not_use_get_the_others_gradients(two_ranks: RankPool) -> None:
    for difference, of_nobody in two_ranks.run(_with_unused):
        assert difference < 1e-6
        assert of_nobody == [0.0]


def _derived() -> tuple[str, float]:
    stock, ours = nn.parallel.DistributedDataParallel(_model()), _model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (stock, ours)]
    ours.with_bagua([optimizers[1]], OfOneOfBaguas())
    for step in range(STEPS):
        for model, optimizer in zip((stock, ours), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, dist.get_rank(), step).backward()
            optimizer.step()
    difference = (_weights_of(stock) - _weights_of(ours)).abs().max()
    return type(ours.bagua_algorithm).__name__, float(difference)


def test_a_class_derived_from_one_of_bagua_s_does_what_it_says(two_ranks: RankPool) -> None:
    for name, difference in two_ranks.run(_derived):
        assert name == "AveragesImpl"
        assert difference < 1e-6


def _saved_whole() -> str:
    """A pickled model is trained by itself, and then by all ranks again. What is said where it has
    the name of the first."""
    model = _model()
    model.with_bagua([], Averages())
    loss_of(model, dist.get_rank(), 0).backward()
    loaded = pickle.loads(pickle.dumps(model))
    assert not loaded[0].weight.is_bagua_tensor()
    if dist.get_rank() == 0:
        loss_of(loaded, 0, 0).backward()
    loaded.with_bagua([], Averages())
    for each in (model, loaded):
        each.zero_grad()
        loss_of(each, dist.get_rank(), 1).backward()
    assert torch.equal(model[0].weight.grad, loaded[0].weight.grad)
    loaded.bagua_module_name = model.bagua_module_name
    try:
        loaded.with_bagua([], Averages())
    except ValueError as error:
        return str(error)
    return ""


def test_a_pickled_model_is_trained_beside_the_first_under_another_name(
    two_ranks: RankPool,
) -> None:
    for refusal in two_ranks.run(_saved_whole):
        assert "give each a bagua_module_name of its own" in refusal
