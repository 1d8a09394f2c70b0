"""A user-written algorithm finds what Bagua gives it: its buckets, and gradients that are there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client import Configuration
from bagua_client.communication import verdict
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_compat.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua_compat.torch_api.bucket import BaguaBucket
from tests.client.algorithms.small import loss_of
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


class Watching(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return WatchingImpl(process_group)


class WatchingImpl(AlgorithmImpl):
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


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    half = nn.Linear(13, 5).to(torch.float64)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), _Widened(half))


class _Widened(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(inputs.to(torch.float64))
        return found


ORDER = [["0.weight", "0.bias"], ["2.inner.weight", "2.inner.bias"]]
EACH = [[name] for name in ("2.inner.bias", "2.inner.weight", "0.bias", "0.weight")]


def _trained(is_cleared_late: bool) -> tuple[list[Any], list[Any], float]:
    """What the algorithm was given, and how far the weights end from one rank's with all data."""
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    model, alone = _model(), _model()
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.05, 0.9) for each in (model, alone))
    trained: Any = model.with_bagua([ours], Watching())  # type: ignore[operator]
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
    for proposed, without, off in two_ranks.run(_trained, is_cleared_late):
        assert (proposed[0], proposed[2]) == (ORDER, ORDER)
        assert sorted(proposed[1]) == sorted(EACH)
        assert len(proposed) == 3
        assert without == [[]] * (3 * 2 + 3 * 4 + 2 * 2)
        assert off < 1e-5


def _trained_with_sizes(by_rank: Sequence[dict[str, str]]) -> list[Any]:
    with (
        mock.patch.dict(os.environ, by_rank[dist.get_rank()]),
        mock.patch.object(verdict, "ANSWER_SECONDS", 2.0),
    ):
        return _trained(False)[0]


def test_a_size_that_is_not_set_alike_on_all_ranks_is_used_by_none(two_ranks: RankPool) -> None:
    name = "BAGUA_DEFAULT_BUCKET_SIZE"
    for proposed in two_ranks.run(_trained_with_sizes, [{name: "1"}, {}]):
        assert (proposed[0], proposed[2]) == (ORDER, ORDER)
    for proposed in two_ranks.run(_trained_with_sizes, [{name: "1"}] * 2):
        assert len(proposed[0]) == 4
