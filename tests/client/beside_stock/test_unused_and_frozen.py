"""Parameters that take no part in a step: unused ones, frozen ones, ones that come and go."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration
from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import (
    BY_NODE,
    FLAT,
    STEPS,
    Recuts,
    failure_of,
    gist,
    recut,
    side_by_side,
    wrapped,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WIDTH = 24
SOON_SECONDS = 3.0
"""Ranks that wait in vain wait so long."""
ALL = (0, 1, 2, 3)


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
    wrapper(torch.randn(3, WIDTH), skip).square().mean().backward()


def _unused(
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


@pytest.mark.parametrize("on_ranks", [(1,), ALL])
@pytest.mark.parametrize(
    ("from_step", "as_view", "set_to_none"), [(0, True, False), (3, False, True), (3, True, True)]
)
def test_unused_parameters(
    beside: Beside, on_ranks: tuple[int, ...], from_step: int, as_view: bool, set_to_none: bool
) -> None:
    beside.check(_unused, on_ranks, from_step, as_view, set_to_none)


def _always_unused(recuts: Recuts, options: dict[str, bool]) -> str | None:
    return side_by_side(
        Branches(), lambda wrapper, step: _backward(wrapper, True), recuts, **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_parameters_that_are_never_used(beside: Beside, options: dict[str, bool]) -> None:
    beside.check(_always_unused, options)


# Errors

UNFINISHED = "Expected to have finished reduction in the prior iteration"


def _unused_unexpectedly(recuts: Recuts, from_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        _backward(wrapper, step >= from_step)

    return side_by_side(Branches(), train, recuts, error=UNFINISHED)


@pytest.mark.parametrize("from_step", [0, 1, 2, 3])
def test_the_error_for_unused_parameters(beside: Beside, from_step: int) -> None:
    """In a step that re-cuts, in the next one where torch cuts for good, and in any other."""
    beside.check(_unused_unexpectedly, from_step)


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


@pytest.mark.parametrize(
    ("ranks_per_node", "ways"), [([2], ((), FLAT)), ([2, 2], (BY_NODE,))], ids=["pair", "by-node"]
)
def test_the_error_for_unused_parameters_on_one_rank(
    ranks_per_node: list[int], ways: tuple[tuple[Configuration, ...], ...]
) -> None:
    """The others cannot go on either, and end with an error of the process group."""
    pool = RankPool(ranks_per_node, collective_timeout_seconds=SOON_SECONDS)
    try:
        stock = pool.run(_unused_on_one_rank, (), False)
        found = [stock, *(pool.run(_unused_on_one_rank, recuts, True) for recuts in ways)]
    finally:
        pool.close()
    assert stock[1][0] == "4"
    assert UNFINISHED in stock[1][1]
    for ranks in found:
        assert ranks[1] == stock[1]
        for step, error in ranks:
            assert step in ("3", "4")
            assert error.startswith("RuntimeError")


# Frozen


def _frozen(recuts: Recuts) -> str | None:
    model = Branches()
    model.first.requires_grad_(False)
    model.last.bias.requires_grad_(False)
    return side_by_side(model, lambda wrapper, step: _backward(wrapper, False), recuts)


def test_frozen_weights(beside: Beside) -> None:
    beside.check(_frozen)


def _frozen_for_a_while(recuts: Recuts, find: bool, from_step: int) -> str | None:
    """After wrapping, a layer is frozen and later trains again: torch's reducer knows it."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module, find_unused_parameters=find)
        made.module.second.requires_grad_(from_step > 0)
        return made

    def train(wrapper: Stock, step: int) -> None:
        wrapper.module.second.requires_grad_(not from_step <= step < 5)
        _backward(wrapper, False)

    return side_by_side(Branches(), train, recuts, wrap=wrap, error="" if find else UNFINISHED)


@pytest.mark.parametrize("find", [True, False])
@pytest.mark.parametrize("from_step", [0, 2])
def test_weights_frozen_after_wrapping(beside: Beside, find: bool, from_step: int) -> None:
    beside.check(_frozen_for_a_while, find, from_step)


def _thawed(recuts: Recuts, at_step: int) -> str | None:
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


@pytest.mark.parametrize("at_step", [0, 3])
def test_weights_thawed_after_wrapping(beside: Beside, at_step: int) -> None:
    beside.check(_thawed, at_step)


def _adversarial(recuts: Recuts) -> str | None:
    """A critic is frozen while its generator trains through it, in every step."""

    def train(critic: Stock, step: int) -> None:
        made = torch.randn(3, WIDTH, requires_grad=True)
        critic.requires_grad_(False)
        critic(made, False).mean().backward()
        critic.requires_grad_(True)
        (critic(made.detach(), False).mean() - critic(made.detach() + 1, False).mean()).backward()

    return side_by_side(Branches(), train, recuts)


def test_a_critic_that_is_frozen_every_other_forward_pass(beside: Beside) -> None:
    beside.check(_adversarial)
