"""Ranks that run out of inputs one by one, under ``join``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import Recuts, side_by_side

pytestmark = pytest.mark.slow

WIDTH = 24
EPOCHS = 6


def _layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    )


def _backward(wrapper: Stock) -> None:
    wrapper(torch.randn(3, WIDTH)).square().mean().backward()


def _joined(
    recuts: Recuts, by_initial: bool, find: bool, batches_first: int, outside: int
) -> str | None:
    """Each step is an epoch: some batches under ``join``, and some for all ranks after it."""

    def train(wrapper: Stock, step: int) -> None:
        with wrapper.join(divide_by_initial_world_size=by_initial):
            for _ in range(batches_first + dist.get_rank()):
                _backward(wrapper)
        for _ in range(outside):
            _backward(wrapper)

    return side_by_side(
        _layers(),
        train,
        recuts,
        steps=EPOCHS,
        find_unused_parameters=find,
        new_reducers=outside > 0,
    )


@pytest.mark.parametrize(
    ("by_initial", "find", "batches_first", "outside"),
    [
        (True, False, 0, 1),
        (False, False, 0, 1),
        (False, True, 0, 1),
        (True, True, 2, 2),
        (False, False, 1, 0),
    ],
)
def test_join(
    beside: Beside, by_initial: bool, find: bool, batches_first: int, outside: int
) -> None:
    beside.check(_joined, by_initial, find, batches_first, outside)


def _join_without_effect(recuts: Recuts) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        with wrapper.join(enable=False):
            _backward(wrapper)

    return side_by_side(_layers(), train, recuts)


def test_join_that_is_not_enabled(beside: Beside) -> None:
    beside.check(_join_without_effect)


def _early_end(recuts: Recuts) -> str | None:
    """All ranks are told in the same step that one of them has no more inputs."""

    def train(wrapper: Stock, step: int) -> None:
        _backward(wrapper)
        if step < 3:
            return
        with wrapper.join(throw_on_early_termination=True):
            for _ in range(1 + dist.get_rank()):
                _backward(wrapper)

    return side_by_side(_layers(), train, recuts, error="exhausted")


def test_an_early_end_is_the_same_error(beside: Beside) -> None:
    beside.check(_early_end)


def _seldom_recut_between(recuts: Recuts) -> str | None:
    """A re-cut comes into force after the first of two epochs that some ranks end early; of all
    pairs, half."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 1:
            with wrapper.join():
                for _ in range(2 * dist.get_rank()):
                    _backward(wrapper)
        else:
            _backward(wrapper)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for first in range(len(recuts)):
        turned = [*recuts[first:], *recuts[:first]]
        for second in range(first % 2, len(recuts), 2):
            found = side_by_side(model, train, [*turned[:1], *turned[second:]], steps=6)
            if found is not None:
                return found
    return None


def test_every_recut_after_an_uneven_epoch(beside: Beside) -> None:
    beside.check(_seldom_recut_between)
