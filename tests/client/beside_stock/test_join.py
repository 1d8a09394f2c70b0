"""Ranks that run out of inputs one by one, under ``join``. (What that refuses, and how it divides,
is in PyTorch's own tests, which ``make upstream-ddp`` runs while buckets are re-cut.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    WIDTH,
    Recuts,
    normed,
    passes,
    side_by_side,
)

pytestmark = pytest.mark.slow

EPOCHS = 6


def epochs(
    recuts: Recuts, by_initial: bool, find: bool, batches_first: int, outside: int
) -> str | None:
    """Each step is an epoch: some batches under ``join``, and some for all ranks after it."""

    def train(wrapper: Stock, step: int) -> None:
        with wrapper.join(divide_by_initial_world_size=by_initial):
            for _ in range(batches_first + dist.get_rank()):
                passes(wrapper)
        for _ in range(outside):
            passes(wrapper)

    return side_by_side(
        normed(),
        train,
        recuts,
        steps=EPOCHS,
        find_unused_parameters=find,
        new_reducers=outside > 0,
    )


def recuts_between_uneven_epochs(recuts: Recuts) -> str | None:
    """A re-cut comes into force after the first of two epochs that some ranks end early; of all
    pairs, half."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 1:
            with wrapper.join():
                for _ in range(2 * dist.get_rank()):
                    passes(wrapper)
        else:
            passes(wrapper)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for first in range(len(recuts)):
        turned = [*recuts[first:], *recuts[:first]]
        for second in range(first % 2, len(recuts), 2):
            found = side_by_side(model, train, [*turned[:1], *turned[second:]], steps=6)
            if found is not None:
                return found
    return None


@table(
    ("by-node", epochs, False, True, 0, 1),
    ("flat", epochs, True, True, 2, 2),
    ("by-node", recuts_between_uneven_epochs),
)
def test_ranks_that_end_one_by_one_do_as_under_torchs_class(
    beside: Beside, compare: Any, arguments: Any
) -> None:
    beside.check(compare, *arguments)
