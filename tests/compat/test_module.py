"""``with_bagua``: the module itself is trained by all ranks, and stays what it was; and Bagua's
DistributedDataParallel, with torch's arguments, and an algorithm that is never left out."""

from __future__ import annotations

import copy
import io
import os
import warnings
import weakref
from collections.abc import Iterator
from itertools import groupby
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client import Configuration
from bagua_client.algorithms import ByteGradAlgorithm
from bagua_compat.torch_api import algorithms
from bagua_compat.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.data_parallel import DistributedDataParallel, all_reduce
from tests.client.agent.scripted_service import ScriptedService
from tests.client.algorithms.small import loss_of, small_model
from tests.compat.scripts import apart, begin, begun_model, sgd, train, weights_of
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

MOST_STEPS = 4000
NAMES = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision", "qadam", "async")


def _algorithm(name: str, optimizer: torch.optim.Optimizer) -> Any:
    if name == "qadam":
        assert isinstance(optimizer, algorithms.q_adam.QAdamOptimizer)
        return algorithms.q_adam.QAdamAlgorithm(optimizer, hierarchical=False)
    made: dict[str, Any] = {
        "gradient_allreduce": algorithms.gradient_allreduce.GradientAllReduceAlgorithm,
        "bytegrad": algorithms.bytegrad.ByteGradAlgorithm,
        "decentralized": algorithms.decentralized.DecentralizedAlgorithm,
        "low_precision": algorithms.decentralized.LowPrecisionDecentralizedAlgorithm,
        "async": lambda: algorithms.async_model_average.AsyncModelAverageAlgorithm(
            sync_interval_ms=1
        ),
    }
    return made[name]()


def _wrapped(model: nn.Module, *optimizers: torch.optim.Optimizer, **options: Any) -> Any:
    begin()
    options.setdefault("algorithm", _algorithm("gradient_allreduce", optimizers[0]))
    untyped: Any = model
    return untyped.with_bagua(list(optimizers), **options)


def _beside_torchs(flatten: bool) -> tuple[bool, bool, float]:
    """Whether it is the same module, with the same names; by how much its weights differ from
    those that torch's wrapper trains, through two re-cuts."""
    stock = nn.parallel.DistributedDataParallel(small_model())
    plain = small_model()
    names = list(plain.state_dict())
    optimizers = [sgd(each) for each in (stock, plain)]
    ours = _wrapped(plain, optimizers[1], do_flatten=flatten)
    for size in (100, 400):
        train(stock, optimizers[0], 3)
        train(ours, optimizers[1], 3)
        assert ours.bagua_ddp.wrapper.reconfigure(Configuration(size))
    with torch.no_grad():
        ours(torch.ones(1, 7))
    train(stock, optimizers[0], 3)
    train(ours, optimizers[1], 3)
    difference = weights_of(stock) - weights_of(ours)
    return ours is plain, list(ours.state_dict()) == names, float(difference.abs().max())


@pytest.mark.parametrize("flatten", [True, False])
def test_it_trains_as_under_torchs_wrapper(two_ranks: RankPool, flatten: bool) -> None:
    for is_same, has_names, difference in two_ranks.run(_beside_torchs, flatten):
        assert is_same
        assert has_names
        assert difference < 1e-6


def _begins(kind: str) -> tuple[float, float, float]:
    """How far apart ranks are in what they begin with, where the first has made more steps."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 5))
    optimizer: torch.optim.Optimizer
    if kind == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    train(model, optimizer, 3 if rank == 0 else 0)
    _wrapped(model, optimizer)
    state = optimizer.state_dict()["state"]
    kept = [v for of in state.values() for v in of.values() if isinstance(v, torch.Tensor)]
    buffers = torch.cat([buffer.double().reshape(-1) for buffer in model.buffers()])
    values = torch.cat(
        [torch.tensor([optimizer.param_groups[0]["lr"]]), *(k.reshape(-1) for k in kept)]
    )
    assert len(kept) == 6 * (3 if kind == "Adam" else 1)
    return apart(weights_of(model)), apart(buffers), apart(values)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_all_ranks_begin_with_the_first_ones_state(two_ranks: RankPool, kind: str) -> None:
    assert two_ranks.run(_begins, kind) == [(0.0, 0.0, 0.0)] * 2


@pytest.fixture
def three_ranks_one_node() -> Iterator[RankPool]:
    pool = RankPool([3])
    yield pool
    pool.close()


def _one_after_the_other() -> list[tuple[str, float, bool]]:
    """For each algorithm its name, how far apart ranks begin, and whether the last wrapper is
    gone."""
    model = small_model()
    optimizer = algorithms.q_adam.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    found, before = [], None
    for name in NAMES:
        model = _wrapped(model, optimizer, algorithm=_algorithm(name, optimizer))
        is_gone = before is None or before() is None
        found.append((model.bagua_algorithm.name, apart(weights_of(model)), is_gone))
        train(model, optimizer, 4)
        before = weakref.ref(model.bagua_ddp.wrapper)
    model.bagua_algorithm.abort(model)
    model.bagua_algorithm.abort(model)
    return found


def test_one_module_goes_on_with_another_algorithm(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_one_after_the_other):
        names = [name for name, _, _ in found]
        assert names == [*NAMES[:3], "low_precision_decentralized", *NAMES[4:]]
        assert [(apart, is_gone) for _, apart, is_gone in found] == [(0.0, True)] * len(NAMES)


def _on_one_node() -> tuple[float, float]:
    """How far apart the ranks' averages are, and their weights in eight bits."""
    model = small_model()
    optimizer = sgd(model)
    by_pairs = algorithms.decentralized.DecentralizedAlgorithm(True, "shift_one")
    train(_wrapped(model, optimizer, algorithm=by_pairs), optimizer, 3)
    untyped: Any = model
    (bucket,) = untyped.bagua_buckets
    average = apart(bucket._peer_weight)
    train(
        _wrapped(model, optimizer, algorithm=_algorithm("low_precision", optimizer)), optimizer, 3
    )
    weights = weights_of(model)
    replicas = torch.cat([each._weight for each in untyped.bagua_buckets])
    assert sorted(replicas.tolist()) == sorted(weights.tolist())
    return average, apart(weights)


def test_hierarchical_on_one_node_is_an_average_over_all(three_ranks_one_node: RankPool) -> None:
    assert three_ranks_one_node.run(_on_one_node) == [(0.0, 0.0)] * 3


def _left_out() -> tuple[float, float]:
    """How far apart a layer's weights are that is left out, and the others."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    untyped: Any = model
    untyped._bagua_params_and_buffers_to_ignore = ["2.weight", "2.bias"]
    optimizer = sgd(model)
    train(_wrapped(model, optimizer), optimizer, 2)
    assert untyped.bagua_module_name == untyped.bagua_ddp.bagua_module_name
    assert [name for name, _ in untyped.bagua_ddp.bagua_build_params()] == ["0.weight", "0.bias"]
    return apart(weights_of(model[2])), apart(weights_of(model[0]))


def test_names_that_are_left_out_stay_each_ranks_own(two_ranks: RankPool) -> None:
    for left_out, others in two_ranks.run(_left_out):
        assert left_out > 0.1
        assert others == 0.0


def _copied() -> tuple[int, int, list[bool]]:
    """Forward passes that were counted; whether copies train alone, with no rank beside them."""
    model = _wrapped(small_model(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies: list[Any] = [copy.deepcopy(model), torch.load(saved, weights_only=False)]
    for each in copies if dist.get_rank() == 0 else []:
        each(torch.ones(1, 7)).sum().backward()
    counted = model.bagua_ddp.bagua_train_step_counter
    model(torch.ones(1, 7)).sum().backward()
    model.eval()(torch.ones(1, 7))
    passes = model.bagua_ddp.bagua_train_step_counter
    return counted, passes, [each.bagua_ddp is None for each in copies]


def test_a_copy_trains_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(_copied) == [(0, 1, [True, True])] * 2


def _outside() -> str:
    group = bagua.communication.new_group([0])
    model = small_model()
    try:
        _wrapped(model, sgd(model), process_group=group)
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_outside_the_group_is_told_so(two_ranks: RankPool) -> None:
    assert two_ranks.run(_outside) == [
        "",
        "rank 1 cannot train Sequential: it is not in the process group, which has ranks [0]",
    ]


def _evaluates() -> tuple[float, list[str]]:
    """The buffer of a rank that evaluates alone; warnings of wrapping."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _wrapped(model, sgd(model))
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    with torch.no_grad():
        for _ in range(2 * dist.get_rank()):
            model.eval()(torch.ones(1, 3))
    mean = model[1].running_mean
    return float(apart(mean) > 0), [str(each.message) for each in caught]


def test_buffers_stay_local_after_the_start_and_one_rank_may_evaluate(two_ranks: RankPool) -> None:
    assert two_ranks.run(_evaluates) == [(1.0, [])] * 2


class Averages(Algorithm):
    """Written for Bagua."""

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return AveragesImpl(process_group)


class AveragesImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(group=self.process_group)


def _tuned(url: str, algorithm: type) -> tuple[list[str], list[int], float]:
    """The configurations that were in force, and how many buckets there were, each in turn; by how
    much gradients were off the mean."""
    model = small_model()
    optimizer = sgd(model)
    with mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}):
        wrapper = _wrapped(model, optimizer, algorithm=algorithm()).bagua_ddp.wrapper
    words, counts, wrong, untyped = [], [], 0.0, cast(Any, model)
    for step in range(MOST_STEPS):
        if not wrapper.is_tuning:
            break
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        wrong = max(wrong, apart(torch.cat([p.grad.reshape(-1) for p in untyped.parameters()])))
        optimizer.step()
        words.append(str(wrapper.configuration))
        counts.append(len(untyped.bagua_buckets))
    return [each for each, _ in groupby(words)], [each for each, _ in groupby(counts)], wrong


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (algorithms.gradient_allreduce.GradientAllReduceAlgorithm, None),
        (Averages, "AveragesImpl"),
    ],
)
def test_it_is_tuned(two_ranks: RankPool, algorithm: type, name: str | None) -> None:
    tried = [Configuration(size) for size in (100, 400, 100)]
    with ScriptedService([[each.to_json() for each in tried]]) as service:
        for words, counts, wrong in two_ranks.run(_tuned, service.url, algorithm):
            assert words[-3:] == list(map(str, tried))
            assert counts == [1, 2, 1, 2]
            assert wrong == 0.0
        assert service.bodies("disagreement") == []
        (registration,) = service.bodies("PUT")
    assert registration["default_configuration"].get("algorithm") == name


def test_every_name_of_any_module_can_be_read() -> None:
    """As torch.compile does, of modules of its own, too."""
    module = nn.Linear(2, 2)
    assert [name for name in dir(module) if not hasattr(module, name)] == []


def test_no_module_is_called_what_another_was_called_before() -> None:
    modules: list[Any] = [nn.Linear(1, 1)]
    names = [modules[0].bagua_module_name]
    assert modules[0].bagua_module_name == names[0]
    for _ in range(20):  # In the memory of the one that is gone, as a rule.
        modules.clear()
        modules.append(nn.Linear(1, 1))
        names.append(modules[0].bagua_module_name)
    assert len(set(names)) == len(names)


def _gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def _accumulates() -> tuple[float, list[str]]:
    """By how much two passes, the first under no_sync, differ from torch's; the names it saves."""
    rank = dist.get_rank()
    stock = nn.parallel.DistributedDataParallel(begun_model())
    # The arguments with which Bagua hands the model over to torch, without its algorithm.
    ours: Any = DistributedDataParallel(
        begun_model(), device_ids=[0], output_device=0, broadcast_buffers=False, bucket_cap_mb=1
    )
    for model in (stock, ours):
        with model.no_sync():
            loss_of(model, rank, 0).backward()
        loss_of(model, rank, 1).backward()
    difference = float((_gradients(stock) - _gradients(ours)).abs().max())
    return difference, list(ours.state_dict())


def test_no_sync_and_names_are_torchs(two_ranks: RankPool) -> None:
    for difference, names in two_ranks.run(_accumulates):
        assert difference < 1e-6
        assert names == ["module.0.weight", "module.0.bias", "module.2.weight", "module.2.bias"]


def _keeps_algorithm() -> str:
    ours: Any = DistributedDataParallel(
        begun_model(), device_ids=[0], algorithm=ByteGradAlgorithm()
    )
    loss_of(ours, dist.get_rank(), 0).backward()
    name: str = ours.bagua_algorithm.name
    return name


def test_device_ids_do_not_cost_the_algorithm(two_ranks: RankPool) -> None:
    assert two_ranks.run(_keeps_algorithm) == ["bytegrad"] * 2


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found


def _used(looks: bool) -> list[list[str]]:
    """The names of what is communicated, before the first pass and after it."""
    begin()
    ours: Any = DistributedDataParallel(Branches(), find_unused_parameters=looks)
    found = [[name for name, _ in ours.inner.bagua_build_params()]]
    ours(torch.ones(2, 3)).sum().backward()
    return [*found, [name for name, _ in ours.inner.bagua_build_params()]]


@pytest.mark.parametrize("looks", [True, False])
def test_unused_parameters_are_told(two_ranks: RankPool, looks: bool) -> None:
    used = ["used.weight", "used.bias"]
    everything = [*used, "unused.weight", "unused.bias"]
    assert two_ranks.run(_used, looks) == [[everything, used if looks else everything]] * 2


def _through() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    x = torch.tensor([1.0, 2.0]) * (rank + 1)
    x.requires_grad_()
    total = all_reduce(x)
    (total * (rank + 1)).sum().backward()
    assert x.grad is not None
    return total.tolist(), x.grad.tolist()


def test_gradients_flow_through_an_all_reduce(two_ranks: RankPool) -> None:
    # Each rank weighs the sum by its number: 1 + 2.
    assert two_ranks.run(_through) == [([3.0, 6.0], [3.0, 3.0])] * 2
