"""An algorithm that was written for Bagua trains, and what cannot be one is refused. (That it is
tuned is in test_module.py, and that Bagua's own train as ours in test_release.py.)"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client import Configuration
from bagua_client.algorithms import ByteGradAlgorithm, GlobalAlgorithmRegistry
from bagua_client.communication import agreement
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_compat.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua_compat.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.data_parallel import DistributedDataParallel
from tests.client.algorithms.small import loss_of
from tests.compat.scripts import begin, begun_model, sgd, train, weights_of
from tests.compat.test_module import Averages, AveragesImpl
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


class Made(Algorithm):
    def __init__(self, impl: type[AlgorithmImpl]) -> None:
        self.impl = impl

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return self.impl(process_group)


class Backwards(nn.Module):
    """Its layers become ready in the order in which they are declared."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


def _in_ready_order() -> tuple[list[list[str]], float]:
    """The names in each bucket, before the first step and after it; how far gradients are off the
    mean."""
    begin()
    torch.manual_seed(0)
    model: Any = Backwards()
    optimizer = sgd(model)
    model.with_bagua([optimizer], Averages())
    assert model.bagua_ddp.wrapper.reconfigure(Configuration(100))
    wrong, names = 0.0, []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.full((1, 40), float(dist.get_rank()))).sum().backward()
        mean = model.first.weight.grad.clone()
        dist.all_reduce(mean)
        wrong = max(wrong, float((mean / 2 - model.first.weight.grad).abs().max()))
        names.append([t.bagua_tensor_name for b in model.bagua_buckets for t in b.tensors])
    return [names[0], names[-1]], wrong


def test_buckets_follow_the_order_in_which_gradients_become_ready(two_ranks: RankPool) -> None:
    backwards = ["first.weight", "second.weight"]
    for names, wrong in two_ranks.run(_in_ready_order):
        assert names == [backwards, backwards[::-1]]
        assert wrong < 1e-6


class Unknown(AlgorithmImpl):
    def init_tensors(self, bagua_ddp: Any) -> list[Any]:
        tensor: Any = torch.zeros(3)
        return [tensor.ensure_bagua_tensor("of nobody", bagua_ddp.bagua_module_name)]


def _refused() -> tuple[str, str]:
    found, model = [], begun_model()
    for algorithm in (Made(Unknown), "bytegrad?"):
        try:
            model.with_bagua([sgd(model)], algorithm)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found[0], found[1]


def test_what_cannot_be_cut_into_buckets_is_refused(two_ranks: RankPool) -> None:
    for tensors, algorithm in two_ranks.run(_refused):
        assert "'of nobody'" in tensors
        assert "must be an instance of Algorithm" in algorithm


def test_algorithms_are_found_by_bagua_s_names() -> None:
    registry = bagua.algorithms.GlobalAlgorithmRegistry
    registry.register("user's", Averages, description="of this test")
    assert isinstance(Algorithm.init("user's"), Averages)
    assert "user's" in registry
    assert "user's" not in GlobalAlgorithmRegistry.available_algorithms()
    # Bagua's, which averages over a single node, and not ours, which pairs the ranks there.
    assert type(Algorithm.init("decentralized")) is DecentralizedAlgorithm
    # Bagua has all but torch's, and none for sharded models.
    ours = set(GlobalAlgorithmRegistry.available_algorithms("replicated"))
    assert ours - {"powersgd"} < set(registry)
    assert "powersgd" not in registry


STEPS = 4


class OfOneOfBaguas(ByteGradAlgorithm):
    """Takes its arguments, and does something else."""

    def reify(self, process_group: Any) -> AlgorithmImpl:  # type: ignore[override]
        return AveragesImpl(process_group)


def _two_in_one_pass() -> float:
    """By how much two models, trained by one loss and one optimizer, differ from torch's."""
    found = []
    for wrap in (
        lambda model, optimizer: model.with_bagua([optimizer], Averages()),
        lambda model, _: nn.parallel.DistributedDataParallel(model),
    ):
        models = [begun_model() for _ in range(2)]
        optimizer = sgd(*models, momentum=0.9)
        wrapped = [wrap(model, optimizer) for model in models]  # type: ignore[no-untyped-call]
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = [loss_of(w, dist.get_rank(), step + i) for i, w in enumerate(wrapped)]
            sum(losses, torch.zeros(())).backward()
            optimizer.step()
        found.append(weights_of(*models))
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
    begin()
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
    stock, ours = nn.parallel.DistributedDataParallel(begun_model()), begun_model()
    optimizers = [sgd(model) for model in (stock, ours)]
    ours.with_bagua([optimizers[1]], OfOneOfBaguas())
    for model, optimizer in zip((stock, ours), optimizers, strict=True):
        train(model, optimizer, STEPS)
    difference = (weights_of(stock) - weights_of(ours)).abs().max()
    return type(ours.bagua_algorithm).__name__, float(difference)


def test_a_class_derived_from_one_of_bagua_s_does_what_it_says(two_ranks: RankPool) -> None:
    for name, difference in two_ranks.run(_derived):
        assert name == "AveragesImpl"
        assert difference < 1e-6


def _saved_whole() -> str:
    """A pickled model is trained by itself, and then by all ranks again. What is said where it has
    the name of the first."""
    model = begun_model()
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


class Watching(AlgorithmImpl):
    """Averages gradients, registered in the model's order, and looks at all of them in each bucket
    (as one does that compresses along the optimizer's parameters)."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group)
        self.proposed: list[list[list[str]]] = []
        self.without: list[list[str]] = []

    def init_tensors(self, bagua_ddp: Any) -> list[Any]:
        return list(reversed(super().init_tensors(bagua_ddp)))

    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        self.proposed.append([[each.bagua_tensor_name for each in bucket] for bucket in tensors])
        return super().tensors_to_buckets(tensors, do_flatten)

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()

        def look(_: str) -> None:
            named = bagua_ddp.module.named_parameters()
            self.without.append([name for name, each in named if each.grad is None])

        bucket.append_python_op(look, group=self.process_group)
        bucket.append_centralized_synchronous_op(group=self.process_group)


class Mixed(nn.Module):
    """Parameters of two types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 5).to(torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(inputs).tanh().to(torch.float64))
        return found


ORDER = [["first.weight", "first.bias"], ["second.weight", "second.bias"]]
EACH = [[name] for names in ORDER for name in names]


def _watched(is_cleared_late: bool) -> tuple[list[Any], list[Any], float]:
    """What the algorithm was given, and how far the weights end from one rank's with all data."""
    begin()
    model, alone = Mixed(), Mixed()
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.05, 0.9) for each in (model, alone))
    trained: Any = model.with_bagua([ours], Made(Watching))  # type: ignore[operator]
    wrapper = trained.bagua_ddp.wrapper
    for step in range(8):
        if step in (3, 6):
            assert wrapper.reconfigure(
                Configuration(1) if step == 3 else tunable_of(wrapper).default
            )
        if not is_cleared_late:
            ours.zero_grad()
        loss = loss_of(trained, dist.get_rank(), step)
        if is_cleared_late:
            ours.zero_grad()
        loss.backward()
        ours.step()
        theirs.zero_grad()
        sum(loss_of(alone, rank, step) for rank in range(2)).div(2).backward()  # type: ignore
        theirs.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    seen = trained.bagua_algorithm
    return seen.proposed, seen.without, max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("is_cleared_late", [False, True])
def test_buckets_are_baguas_and_gradients_are_there(
    two_ranks: RankPool, is_cleared_late: bool
) -> None:
    for proposed, without, off in two_ranks.run(_watched, is_cleared_late):
        assert (proposed[0], proposed[2]) == (ORDER, ORDER)
        assert sorted(proposed[1]) == sorted(EACH)
        assert len(proposed) == 3
        assert without == [[]] * (3 * 2 + 3 * 4 + 2 * 2)
        assert off < 1e-5


def _trained_with_sizes(by_rank: Sequence[dict[str, str]]) -> list[Any]:
    with (
        mock.patch.dict(os.environ, by_rank[dist.get_rank()]),
        mock.patch.object(agreement, "ANSWER_SECONDS", 2.0),
    ):
        return _watched(False)[0]


def test_a_size_that_is_not_set_alike_on_all_ranks_is_used_by_none(two_ranks: RankPool) -> None:
    name = "BAGUA_DEFAULT_BUCKET_SIZE"
    for proposed in two_ranks.run(_trained_with_sizes, [{name: "1"}, {}]):
        assert (proposed[0], proposed[2]) == (ORDER, ORDER)
    for proposed in two_ranks.run(_trained_with_sizes, [{name: "1"}] * 2):
        assert len(proposed[0]) == 4
