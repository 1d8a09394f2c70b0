"""Activation checkpoints, whose backward passes run forward passes and backward passes again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint

from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import Recuts, side_by_side
from tests.client.beside_stock.test_backward_passes import UNFINISHED, WIDTH, backward, inputs

pytestmark = pytest.mark.slow


class Checkpointed(nn.Module):
    """Layers of which some are recomputed in a backward pass of their own."""

    def __init__(self, times: int, unused: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else nn.Identity()
        self.times = times

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for _ in range(self.times):
            values = checkpoint(self.second, values, use_reentrant=True)
        return values


def _checkpointed(
    recuts: Recuts, times: int, unused: bool, find: bool, static: bool, error: str
) -> str | None:
    return side_by_side(
        Checkpointed(times, unused),
        lambda wrapper, step: backward(wrapper(inputs())),
        recuts,
        error=error,
        find_unused_parameters=find,
        static_graph=static,
    )


TWICE = "Expected to mark a variable ready only once"


@pytest.mark.parametrize(
    ("times", "unused", "find", "static", "error"),
    [
        (1, False, False, False, ""),
        (1, False, True, False, TWICE),
        (1, False, False, True, ""),
        (2, False, False, False, TWICE),
        (2, False, False, True, ""),
        (1, True, False, False, UNFINISHED),
        (1, True, True, False, TWICE),
        (1, True, False, True, ""),
        (2, True, True, True, ""),
    ],
)
def test_reentrant_checkpoints(
    beside: Beside, times: int, unused: bool, find: bool, static: bool, error: str
) -> None:
    beside.check(_checkpointed, times, unused, find, static, error)


def _wrapper_in_a_checkpoint(recuts: Recuts, reentrant: bool) -> str | None:
    """The re-cut is due in a forward pass that a backward pass runs."""

    def train(wrapper: Stock, step: int) -> None:
        backward(checkpoint(wrapper, inputs(grad=True), use_reentrant=reentrant))

    return side_by_side(nn.Linear(WIDTH, WIDTH), train, recuts)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_wrapper_itself_in_a_checkpoint(beside: Beside, reentrant: bool) -> None:
    beside.check(_wrapper_in_a_checkpoint, reentrant)
