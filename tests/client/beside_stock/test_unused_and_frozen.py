"""Parameters that take no part in a step: unused ones, frozen ones, ones that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    BY_NODE,
    STEPS,
    UNFINISHED,
    WIDTH,
    Recuts,
    backward,
    failure_of,
    gist,
    inputs,
    recut,
    side_by_side,
    wrapped,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

SOON_SECONDS = 3.0
"""Ranks that wait in vain wait so long."""


class Branches(nn.Module):
    """The second layer takes no part where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor, skip: bool) -> torch.Tensor:
        values = self.first(values)
        if not skip:
            values = self.second(values)
        result: torch.Tensor = self.last(values)
        return result


def _backward(wrapper: Stock, skip: bool) -> None:
    backward(wrapper(inputs(), skip))


def unused(
    recuts: Recuts, on_ranks: tuple[int, ...], from_step: int, as_view: bool, set_to_none: bool
) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        _backward(wrapper, step >= from_step and dist.get_rank() in on_ranks)

    return side_by_side(
        Branches(),
        train,
        recuts,
        set_to_none=set_to_none,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
    )


def never_used(recuts: Recuts, *options: str) -> str | None:
    given = dict.fromkeys(options, True)
    return side_by_side(Branches(), lambda wrapper, _: _backward(wrapper, True), recuts, **given)


def unused_unexpectedly(recuts: Recuts, from_step: int) -> str | None:
    """In a step that re-cuts, in the next one where torch cuts for good, and in any other."""

    def train(wrapper: Stock, step: int) -> None:
        _backward(wrapper, step >= from_step)

    return side_by_side(Branches(), train, recuts, error=UNFINISHED)


def frozen(recuts: Recuts) -> str | None:
    model = Branches()
    model.first.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return side_by_side(model, lambda wrapper, step: _backward(wrapper, False), recuts)


def frozen_for_a_while(recuts: Recuts, find: bool, from_step: int) -> str | None:
    """After wrapping, a layer is frozen and later trains again: torch's reducer knows it."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module, find_unused_parameters=find)
        made.module.second.requires_grad_(from_step > 0)
        return made

    def train(wrapper: Stock, step: int) -> None:
        wrapper.module.second.requires_grad_(not from_step <= step < 5)
        _backward(wrapper, False)

    return side_by_side(Branches(), train, recuts, wrap=wrap, error="" if find else UNFINISHED)


def thawed(recuts: Recuts, at_step: int) -> str | None:
    """Frozen when the model was wrapped: torch's reducer never knows it, and reduces the rest."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module)
        made.module.second.requires_grad_(at_step == 0)
        return made

    def train(wrapper: Stock, step: int) -> None:
        wrapper.module.second.requires_grad_(step >= at_step)
        _backward(wrapper, False)

    model = Branches()
    model.second.requires_grad_(False)
    return side_by_side(model, train, recuts, wrap=wrap)


def critic_that_is_frozen_in_turns(recuts: Recuts) -> str | None:
    """A critic is frozen while its generator trains through it, in every step."""

    def train(critic: Stock, step: int) -> None:
        made = torch.randn(3, WIDTH, requires_grad=True)
        critic.requires_grad_(False)
        critic(made, False).mean().backward()
        critic.requires_grad_(True)
        (critic(made.detach(), False).mean() - critic(made.detach() + 1, False).mean()).backward()

    return side_by_side(Branches(), train, recuts)


@table(
    ("flat", unused, (1,), 0, True, False),
    ("by-node", unused, (1,), 3, False, True),
    ("flat", unused, (0, 1), 3, True, True),
    ("by-node", unused, (0, 1, 2, 3), 0, True, False),
    ("flat", never_used, "static_graph"),
    ("by-node", never_used, "skip_all_reduce_unused_params", "find_unused_parameters"),
    ("flat", unused_unexpectedly, 2),
    ("by-node", unused_unexpectedly, 3),
    ("by-node", frozen),
    ("flat", frozen_for_a_while, True, 0),
    ("by-node", frozen_for_a_while, False, 2),
    ("by-node", frozen_for_a_while, True, 2),
    ("flat", thawed, 0),
    ("by-node", thawed, 3),
    ("flat", critic_that_is_frozen_in_turns),
)
def test_weights_that_take_no_part_are_treated_as_by_torch(
    beside: Beside, compare: Any, arguments: Any
) -> None:
    beside.check(compare, *arguments)


def _unused_on_one_rank(recuts: Recuts, is_ours: bool) -> list[str]:
    """Rank 1 leaves a layer out in step 3: the step that fails, and how."""
    stock, ours = wrapped(Branches())

    def train(wrapper: Stock, step: int) -> None:
        loss = wrapper(torch.randn(3, WIDTH), step == 3 and dist.get_rank() == 1).mean()
        if is_ours and recuts:
            # So that one is due where the next step fails.
            recut(ours, recuts, 2 * step)
        loss.backward()

    for step in range(STEPS):
        error = failure_of(train, ours if is_ours else stock, step)
        if error is not None:
            return [str(step), gist(error)]
    return ["no step", ""]


def test_the_error_for_unused_parameters_on_one_rank() -> None:
    """The others cannot go on either, and end with an error of the process group."""
    pool = RankPool([2, 2], collective_timeout_seconds=SOON_SECONDS)
    try:
        stock = pool.run(_unused_on_one_rank, (), False)
        ours = pool.run(_unused_on_one_rank, BY_NODE, True)
    finally:
        pool.close()
    assert stock[1][0] == "4"
    assert UNFINISHED in stock[1][1]
    for ranks in (stock, ours):
        assert ranks[1] == stock[1]
        for step, error in ranks:
            assert step in ("3", "4")
            assert error.startswith("RuntimeError")
