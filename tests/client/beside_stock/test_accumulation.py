"""Gradients that add up over several backward passes, across re-cuts."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import Recuts, side_by_side
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WIDTH = 24
SETTLED = 5
"""Steps after which torch alone carries the buckets."""


def _backward(wrapper: Stock, *args: object) -> None:
    wrapper(torch.randn(3, WIDTH), *args).square().mean().backward()


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _micro_batches(recuts: Recuts, as_view: bool, set_to_none: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        for _ in range(2):
            with wrapper.no_sync():
                _backward(wrapper)
        _backward(wrapper)

    return side_by_side(
        _layers(), train, recuts, set_to_none=set_to_none, gradient_as_bucket_view=as_view
    )


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches(beside: Beside, as_view: bool, set_to_none: bool) -> None:
    beside.check(_micro_batches, as_view, set_to_none)


def _sums_over_steps(recuts: Recuts, as_view: bool) -> str | None:
    """Without zeroing, so that each step adds to gradients that were reduced before."""

    def train(wrapper: Stock, step: int) -> None:
        for _ in range(3):
            _backward(wrapper)

    return side_by_side(_layers(), train, recuts, gradient_as_bucket_view=as_view)


@pytest.mark.parametrize("as_view", [True, False])
def test_sums_of_reduced_gradients(beside: Beside, as_view: bool) -> None:
    beside.check(_sums_over_steps, as_view)


def _uneven_micro_batches(recuts: Recuts) -> str | None:
    """Each rank has a number of micro batches of its own, of which the last one synchronises."""

    def train(wrapper: Stock, step: int) -> None:
        for _ in range((dist.get_rank() + step) % 2):
            with wrapper.no_sync():
                _backward(wrapper)
        _backward(wrapper)

    return side_by_side(_layers(), train, recuts)


def test_ranks_with_different_numbers_of_micro_batches(beside: Beside) -> None:
    beside.check(_uneven_micro_batches)


class Branches(nn.Module):
    """Two branches, of which a forward pass takes those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        if left:
            values = self.left(values)
        if right:
            values = self.right(values)
        return values


def _used_without_sync_only(recuts: Recuts, as_view: bool, on_ranks: tuple[int, ...]) -> str | None:
    """A branch takes part in the micro batches that do not synchronise, and on some ranks only."""

    def train(wrapper: Stock, step: int) -> None:
        with wrapper.no_sync():
            _backward(wrapper, True, dist.get_rank() in on_ranks)
        _backward(wrapper, True, False)

    return side_by_side(
        Branches(), train, recuts, find_unused_parameters=True, gradient_as_bucket_view=as_view
    )


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("on_ranks", [(0,), (0, 1, 2, 3)])
def test_what_only_micro_batches_without_sync_used_is_reduced_too(
    beside: Beside, as_view: bool, on_ranks: tuple[int, ...]
) -> None:
    beside.check(_used_without_sync_only, as_view, on_ranks)


def _static_graph(recuts: Recuts, warm_up_steps: int) -> str | None:
    """Micro batches begin once torch has seen the graph."""

    def train(wrapper: Stock, step: int) -> None:
        if step >= warm_up_steps:
            with wrapper.no_sync():
                _backward(wrapper)
        _backward(wrapper)

    return side_by_side(_layers(), train, recuts, static_graph=True)


@pytest.mark.parametrize("warm_up_steps", [2, 99])
def test_static_graph(beside: Beside, warm_up_steps: int) -> None:
    beside.check(_static_graph, warm_up_steps)


def _first_pass_after_a_change() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of one without sync, and those of the bare model."""
    wrapper = DistributedDataParallel(_layers())
    for _ in range(SETTLED):
        _backward(wrapper)
    wrapper.zero_grad()
    assert wrapper.reconfigure(Configuration(1))
    bare = copy.deepcopy(wrapper.module)
    inputs = torch.randn(3, WIDTH) + dist.get_rank()
    with wrapper.no_sync():
        wrapper(inputs).square().mean().backward()
    bare(inputs).square().mean().backward()
    pair = wrapper, bare
    own, expected = ([p.grad for p in model.parameters() if p.grad is not None] for model in pair)
    return own, expected


def test_a_pass_without_sync_right_after_a_change_is_the_ranks_own(two_ranks: RankPool) -> None:
    for own, expected in two_ranks.run(_first_pass_after_a_change):
        assert len(own) == len(expected) == 4
        assert all(map(torch.equal, own, expected))
