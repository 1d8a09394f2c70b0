"""Buckets follow the order in which gradients became ready, as rank 0 saw it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagua_client import Configuration
from bagua_client.reducer.ready_order import RECORDED_STEPS, ReadyOrder
from tests.client.comparison import difference, pair
from tests.ranks import RankPool


@given(data=st.data(), initial=st.permutations(range(8)))
def test_the_record_is_a_permutation_with_what_was_never_ready_last(
    data: st.DataObject, initial: list[int]
) -> None:
    order = ReadyOrder(initial)
    seen: list[int] = data.draw(st.permutations(range(8)))[: data.draw(st.integers(0, 8))]
    for step in range(RECORDED_STEPS):
        for index in seen:
            order.record(index)
        assert order.end_step() is (step == RECORDED_STEPS - 1)
    assert order.recorded() == seen + [index for index in initial if index not in seen]


def test_the_mean_place_of_the_recorded_steps_decides() -> None:
    order = ReadyOrder([0, 1, 2])
    for step in ([2, 0, 1], [0, 2, 1]):
        for index in step:
            order.record(index)
        order.end_step()
    assert order.recorded() == [0, 2, 1]


class _Layers(nn.Module):
    """Layers that run in another order than they are declared in."""

    def __init__(self, execution: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in execution)
        self.execution = execution

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for index in self.execution:
            values = self.layers[index](values)
        return values


def _partitions(executions: list[list[int]]) -> list[tuple[tuple[int, ...], ...]]:
    models = pair(_Layers(executions[dist.get_rank()]))
    _, ours = models
    assert ours.reconfigure(Configuration(bucket_bytes=2 * 3 * 3 * 4))
    partitions = []
    for _ in range(RECORDED_STEPS + 2):
        inputs = torch.randn(2, 3)
        for model in models:
            model.zero_grad()
            model(inputs).sum().backward()
        assert difference(*models) is None
        partitions.append(ours._reducer.layout.partition)
    return partitions


def test_buckets_are_cut_in_the_order_of_the_backward_pass(two_ranks: RankPool) -> None:
    for partitions in two_ranks.run(_partitions, [[2, 0, 1, 3]] * 2):
        assert partitions[0] == ((3, 2), (1, 0)), "at first the reverse of the declaration"
        assert partitions[-1] == ((3, 1), (0, 2))


def test_ranks_that_run_the_layers_in_other_orders_take_rank_0s(two_ranks: RankPool) -> None:
    for partitions in two_ranks.run(_partitions, [[2, 0, 1, 3], [3, 1, 0, 2]]):
        assert partitions[-1] == ((3, 1), (0, 2))
