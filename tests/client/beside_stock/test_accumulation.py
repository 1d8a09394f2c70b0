"""Gradients that add up over several backward passes, across re-cuts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    WIDTH,
    Recuts,
    backward,
    inputs,
    layers,
    passes,
    side_by_side,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

SETTLED = 5
"""Steps after which torch alone carries the buckets."""


def micro_batches(recuts: Recuts, as_view: bool, set_to_none: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        for _ in range(2):
            with wrapper.no_sync():
                passes(wrapper)
        passes(wrapper)

    return side_by_side(
        layers(), train, recuts, set_to_none=set_to_none, gradient_as_bucket_view=as_view
    )


def sums_of_reduced_gradients(recuts: Recuts, as_view: bool) -> str | None:
    """Without zeroing, so that each pass adds to gradients that were reduced before."""

    def train(wrapper: Stock, step: int) -> None:
        for _ in range(3):
            passes(wrapper)

    return side_by_side(layers(), train, recuts, gradient_as_bucket_view=as_view)


def uneven_micro_batches(recuts: Recuts) -> str | None:
    """Each rank has a number of micro batches of its own, of which the last one synchronises."""

    def train(wrapper: Stock, step: int) -> None:
        for _ in range((dist.get_rank() + step) % 2):
            with wrapper.no_sync():
                passes(wrapper)
        passes(wrapper)

    return side_by_side(layers(), train, recuts)


class Branches(nn.Module):
    """Two branches, of which a forward pass takes those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor, right: bool) -> torch.Tensor:
        values = self.left(values)
        if right:
            values = self.right(values)
        return values


def used_without_sync_only(recuts: Recuts, as_view: bool, on_ranks: tuple[int, ...]) -> str | None:
    """A branch takes part in the micro batches that do not synchronise, and on some ranks only."""

    def train(wrapper: Stock, step: int) -> None:
        with wrapper.no_sync():
            backward(wrapper(inputs(), dist.get_rank() in on_ranks))
        backward(wrapper(inputs(), False))

    return side_by_side(
        Branches(), train, recuts, find_unused_parameters=True, gradient_as_bucket_view=as_view
    )


def static_graph(recuts: Recuts, warm_up_steps: int) -> str | None:
    """Micro batches begin once torch has seen the graph."""

    def train(wrapper: Stock, step: int) -> None:
        if step >= warm_up_steps:
            with wrapper.no_sync():
                passes(wrapper)
        passes(wrapper)

    return side_by_side(layers(), train, recuts, static_graph=True)


@table(
    ("flat", micro_batches, True, True),
    ("flat", micro_batches, False, False),
    ("by-node", micro_batches, True, False),
    ("by-node", micro_batches, False, True),
    ("flat", sums_of_reduced_gradients, True),
    ("by-node", sums_of_reduced_gradients, False),
    ("by-node", uneven_micro_batches),
    ("flat", used_without_sync_only, True, (0,)),
    ("flat", used_without_sync_only, False, (0, 1)),
    ("by-node", used_without_sync_only, True, (0, 1, 2, 3)),
    ("by-node", used_without_sync_only, False, (0,)),
    ("flat", static_graph, 2),
    ("by-node", static_graph, 99),
)
def test_gradients_that_add_up_are_torchs(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)


def _first_pass_after_a_change() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of one without sync, and those of the bare model."""
    wrapper = DistributedDataParallel(layers())
    for _ in range(SETTLED):
        passes(wrapper)
    wrapper.zero_grad()
    assert wrapper.reconfigure(Configuration(1))
    bare = copy.deepcopy(wrapper.module)
    own_inputs = inputs() + dist.get_rank()
    with wrapper.no_sync():
        backward(wrapper(own_inputs))
    backward(bare(own_inputs))
    pair = wrapper, bare
    own, expected = ([p.grad for p in model.parameters() if p.grad is not None] for model in pair)
    return own, expected


def test_a_pass_without_sync_right_after_a_change_is_the_ranks_own(two_ranks: RankPool) -> None:
    for own, expected in two_ranks.run(_first_pass_after_a_change):
        assert len(own) == len(expected) == 4
        assert all(map(torch.equal, own, expected))
