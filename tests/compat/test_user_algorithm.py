"""Algorithms that were written for Bagua, as its tutorial writes them, train and are re-cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import groupby
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client import Configuration
from bagua_client.algorithms import GlobalAlgorithmRegistry
from bagua_compat.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua_compat.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua_compat.torch_api.algorithms.q_adam import QAdamAlgorithm, QAdamOptimizer
from bagua_compat.torch_api.bucket import BaguaBucket
from tests.client.agent.scripted_service import ScriptedService
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS = 8
WARM_UP = 3
MOST_STEPS = 4000


class Momenta(Algorithm):
    """QAdam, as a user would write it after the tutorial."""

    def __init__(self, optimizer: QAdamOptimizer) -> None:
        self.optimizer = optimizer

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return MomentaImpl(process_group, self.optimizer)


class MomentaImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, optimizer: QAdamOptimizer) -> None:
        super().__init__(process_group)
        self.optimizer = optimizer

    @property
    def is_warm(self) -> bool:
        return self.optimizer.steps_done >= WARM_UP

    def need_reset(self) -> bool:
        return self.optimizer.steps_done == WARM_UP

    def init_tensors(self, bagua_ddp: Any) -> list[Any]:
        tensors = super().init_tensors(bagua_ddp)
        if not self.is_warm:
            return tensors
        state = self.optimizer.state
        for tensor in tensors:
            tensor.ensure_bagua_tensor(
                tensor.bagua_tensor_name,
                bagua_ddp.bagua_module_name,
                getter_closure=lambda p: state[p]["exp_avg"],
                setter_closure=lambda p, value: state[p].update(exp_avg=value),
            )
        return tensors

    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        ranks = self.process_group.get_global_communicator().nranks()
        return [
            BaguaBucket(each, flatten=do_flatten, name=str(place), alignment=ranks)
            for place, each in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if not self.is_warm:
            bucket.append_centralized_synchronous_op(group=self.process_group)
            return

        def blend(name: str) -> None:
            beta1, _ = self.optimizer.param_groups[0]["betas"]
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(beta1).add_(tensor.grad, alpha=1 - beta1)

        bucket.append_python_op(blend, group=self.process_group)
        bucket.append_centralized_synchronous_op(
            scattergather=True, compression="MinMaxUInt8", group=self.process_group
        )


class Weights(Algorithm):
    """Decentralized, exact or in eight bits, as in Bagua's own files."""

    def __init__(self, in_eight_bits: bool) -> None:
        self.in_eight_bits = in_eight_bits

    def reify(self, process_group: Any) -> AlgorithmImpl:
        return (DifferencesImpl if self.in_eight_bits else PeersImpl)(process_group)


class WeightsImpl(AlgorithmImpl):
    def init_tensors(self, bagua_ddp: Any) -> list[Any]:
        named: Any = bagua_ddp.bagua_build_params()
        self.tensors = [
            tensor.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, tensor in reversed(named)
        ]
        return self.tensors

    def init_backward_hook(self, bagua_ddp: Any) -> Callable[..., object]:
        return lambda name, parameter: None


class PeersImpl(WeightsImpl):
    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket([t for each in tensors for t in each], "0", flatten=do_flatten)]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        average: Any = bucket.flattened_tensor()
        self.operation = bucket.append_decentralized_synchronous_op(
            average.ensure_bagua_tensor("peer_weight"),
            hierarchical=False,
            peer_selection_mode="shift_one",
            group=self.process_group,
        )

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[..., object]:
        def hook(inputs: Any) -> None:
            for tensor in self.tensors:
                tensor.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp: Any) -> Callable[[], object]:
        def hook() -> None:
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            for bucket in bagua_ddp.bagua_buckets:
                self.operation.copy_back_peer_weight(bucket.backend_bucket)

        return hook


class DifferencesImpl(WeightsImpl):
    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        replicas = [bucket.flattened_tensor() for _ in range(3)]
        bucket.append_low_precision_decentralized_synchronous_op(
            *replicas, hierarchical=False, group=self.process_group
        )

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Callable[..., object]:
        def hook(optimizer: torch.optim.Optimizer) -> None:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    tensor.bagua_mark_communication_ready()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook


def _trained(
    make: Callable[[Any, torch.optim.Optimizer], Any],
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    recuts: bool,
) -> tuple[torch.Tensor, list[int]]:
    """The weights after some steps, and how many buckets there were in each."""
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    model: Any = small_model()
    optimizer = optimizer_of(model.parameters())
    model.with_bagua([optimizer], make(model, optimizer))
    counts = []
    for step in range(STEPS):
        if recuts and step in (2, 5):
            assert model.bagua_ddp.wrapper.reconfigure(Configuration(100 if step == 2 else 400))
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        counts.append(len(model.bagua_buckets))
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), counts


def _adam(parameters: Any) -> QAdamOptimizer:
    return QAdamOptimizer(parameters, lr=0.01, warmup_steps=WARM_UP)


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def _momenta(recuts: bool) -> tuple[float, float, list[int]]:
    """How far ours and the user's QAdam differ, how far they have moved, and the buckets."""
    start = torch.cat([p.detach().reshape(-1) for p in small_model().parameters()])
    users, counts = _trained(lambda _, optimizer: Momenta(optimizer), _adam, recuts)  # type: ignore
    ours, _ = _trained(lambda _, optimizer: QAdamAlgorithm(optimizer, False), _adam, recuts)  # type: ignore
    return float((users - ours).abs().max()), float((users - start).abs().max()), counts


@pytest.mark.parametrize("recuts", [False, True])
def test_the_tutorials_algorithm_trains_as_ours_and_is_recut(
    two_ranks: RankPool, recuts: bool
) -> None:
    for difference, moved, counts in two_ranks.run(_momenta, recuts):
        # What eight bits lose depends on what shares a bucket.
        assert difference < 0.1 * moved
        assert counts == ([1, 1, 2, 2, 2, 1, 1, 1] if recuts else [1] * STEPS)


def _tuned(url: str) -> list[int]:
    """How many buckets there were, in turn."""
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    model: Any = small_model()
    optimizer = _adam(model.parameters())
    with mock.patch.dict(os.environ, variables):
        model.with_bagua([optimizer], Momenta(optimizer))
    counts = []
    for step in range(MOST_STEPS):
        if not model.bagua_ddp.wrapper.is_tuning:
            break
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        counts.append(len(model.bagua_buckets))
    return [count for count, _ in groupby(counts)]


def test_a_tuning_recuts_it(two_ranks: RankPool) -> None:
    tried = [Configuration(size).to_json() for size in (100, 400, 100)]
    with ScriptedService([tried]) as service:
        counts = two_ranks.run(_tuned, service.url)
        assert service.bodies("disagreement") == []
        (registration,) = service.bodies("PUT")
    assert registration["default_configuration"]["algorithm"] == "MomentaImpl"
    assert counts == [[1, 2, 1, 2]] * 2


def _weights(in_eight_bits: bool) -> float:
    ours = (
        LowPrecisionDecentralizedAlgorithm(hierarchical=False)
        if in_eight_bits
        else DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="shift_one")
    )
    users, _ = _trained(lambda *_: Weights(in_eight_bits), _sgd, recuts=False)
    expected, _ = _trained(lambda *_: ours, _sgd, recuts=False)
    return float((users - expected).abs().max())


@pytest.mark.parametrize("in_eight_bits", [False, True])
def test_weights_that_a_user_has_travel_go_as_ours_do(
    four_ranks: RankPool, in_eight_bits: bool
) -> None:
    assert max(four_ranks.run(_weights, in_eight_bits)) < 1e-6


class Backwards(nn.Module):
    """Its layers become ready in the order in which they are declared."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


class Averages(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return AveragesImpl(process_group)


class AveragesImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(group=self.process_group)


def _in_ready_order() -> tuple[list[list[str]], float]:
    """The names in each bucket, before the first step and after it; how far gradients are off the
    mean."""
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    torch.manual_seed(0)
    model: Any = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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


class Unknown(WeightsImpl):
    def init_tensors(self, bagua_ddp: Any) -> list[Any]:
        tensor: Any = torch.zeros(3)
        return [tensor.ensure_bagua_tensor("of nobody", bagua_ddp.bagua_module_name)]


class UnknownAlgorithm(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return Unknown(process_group)


def _refused() -> tuple[str, str]:
    found = []
    for algorithm in (UnknownAlgorithm(), "bytegrad?"):
        try:
            _trained(lambda *_, given=algorithm: given, _sgd, recuts=False)  # type: ignore[misc]
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
