"""Passes that do not come in pairs, that break, that run inside others (activation checkpoints,
steps that a model makes itself), whose gradients add up, and under ``join``, across re-cuts. (What
``join`` refuses, and how it divides, is in PyTorch's own tests, which ``make upstream-ddp``
runs.)"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint

from bagua_client import Configuration, DistributedDataParallel
from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    AS_VIEW,
    FIND,
    STATIC,
    UNFINISHED,
    WIDTH,
    Recuts,
    backward,
    inputs,
    layers,
    normed,
    passes,
    side_by_side,
    switched_on,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


class Pair(nn.Module):
    """Two layers, the base of models that use them in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> Any:
        return self.second(self.first(values))


class Scaled(nn.Module):
    """Uses a buffer that autograd saves, and changes it in the next forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(values) * self.scale
        return result


def two_forward_passes(recuts: Recuts, *options: str) -> str | None:
    if "forward_sync_buffers" not in inspect.signature(Stock).parameters:
        return None  # Torch 2.11 itself fails.

    def train(wrapper: Stock, step: int) -> None:
        backward(wrapper(inputs()) + wrapper(inputs()))

    return side_by_side(Scaled(), train, recuts, **switched_on(options))


def forward_without_sync_before_the_backward_pass(recuts: Recuts, *options: str) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        first = wrapper(inputs())
        with wrapper.no_sync():
            wrapper(inputs())
        backward(first)

    return side_by_side(Pair(), train, recuts, **switched_on(options))


class Halves(Pair):
    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(values), self.second(values)


def backward_for_each_output(recuts: Recuts) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        for output in wrapper(inputs()):
            backward(output)

    return side_by_side(Halves(), train, recuts)


def forward_on_one_rank(recuts: Recuts, grad: bool, trains: bool, validates: bool) -> str | None:
    """The first rank looks at an output while the others wait for it, after a re-cut and a step.

    Args:
        trains: whether the model trains in training mode.
        validates: whether it is validated in it.
    """

    def alone(wrapper: Stock) -> None:
        if dist.get_rank() == 0:
            wrapper.train(validates)
            with torch.set_grad_enabled(grad):
                wrapper(inputs())
            wrapper.train(trains)
        dist.barrier()

    def train(wrapper: Stock, step: int) -> None:
        alone(wrapper)
        passes(wrapper)
        alone(wrapper)

    # Torch cuts its own buckets for good in whatever forward pass comes second.
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module.train(trains))
        for _ in range(2):
            backward(made(torch.ones(1, WIDTH)))
        return made

    return side_by_side(Pair(), train, recuts, wrap=wrap)


def training_mode_in_turns(recuts: Recuts) -> str | None:
    """Each step in the other mode; every other one accumulates."""

    def train(wrapper: Stock, step: int) -> None:
        wrapper.train(step % 3 == 1)
        if step % 2:
            with wrapper.no_sync():
                passes(wrapper)
        passes(wrapper)

    return side_by_side(Scaled(), train, recuts)


class _Broken(torch.autograd.Function):
    """Its backward pass raises while it is told to."""

    told = False

    @staticmethod
    def forward(ctx: FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        if _Broken.told:
            raise ArithmeticError("broken")
        return gradient


class Breaking(Pair):
    """Breaks in the middle of its backward pass."""

    def forward(self, values: torch.Tensor) -> Any:
        return self.second(_Broken.apply(self.first(values)))


def error_after_a_backward_pass_that_broke(recuts: Recuts, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        output = wrapper(inputs())
        _Broken.told = step == at_step
        with pytest.raises(ArithmeticError) if _Broken.told else nullcontext():
            backward(output)

    return side_by_side(Breaking(), train, recuts, error=UNFINISHED)


# Activation checkpoints, whose backward passes run forward passes and backward passes again


class Checkpointed(Pair):
    """The second layer is recomputed in a backward pass of its own."""

    def __init__(self, times: int, has_unused: bool) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH) if has_unused else nn.Identity()
        self.times = times

    def forward(self, values: torch.Tensor) -> Any:
        values = self.first(values)
        for _ in range(self.times):
            values = checkpoint(self.second, values, use_reentrant=True)
        return values


def reentrant(
    recuts: Recuts, times: int, has_unused: bool, error: str, *options: str
) -> str | None:
    model = Checkpointed(times, has_unused)
    return side_by_side(model, passes, recuts, error=error, **switched_on(options))


def wrapper_in_a_checkpoint(recuts: Recuts, is_reentrant: bool) -> str | None:
    """The re-cut is due in a forward pass that a backward pass runs."""

    def train(wrapper: Stock, step: int) -> None:
        backward(checkpoint(wrapper, inputs(grad=True), use_reentrant=is_reentrant))

    return side_by_side(nn.Linear(WIDTH, WIDTH), train, recuts)


TWICE = "Expected to mark a variable ready only once"


# Backward passes inside forward, as Lightning's manual optimization runs them


class Manual(Pair):
    """A training step in ``forward``, which announces each backward pass in it."""

    def __init__(self, backward_passes: int) -> None:
        super().__init__()
        self.backward_passes = backward_passes
        self.announce: Callable[[], None] = lambda: None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        loss = values.sum()
        for _ in range(self.backward_passes):
            loss = super().forward(values).square().mean()
            self.announce()
            loss.backward()
        return loss.detach()


def passes_inside_forward(recuts: Recuts, backward_passes: int, outside: bool) -> str | None:
    """``outside``: whether the forward pass synchronises until its own backward passes come."""

    def train(wrapper: Stock, step: int) -> None:
        module = wrapper.module
        assert isinstance(module, Manual)

        def announce() -> None:
            wrapper.require_backward_grad_sync = True
            wrapper.reducer._rebuild_buckets()
            wrapper.reducer.prepare_for_backward([])

        module.announce = announce
        wrapper.require_backward_grad_sync = outside
        # Before torch looks for what the output depends on.
        ended = module.register_forward_hook(
            lambda *_: setattr(wrapper, "require_backward_grad_sync", False)
        )
        wrapper(inputs())
        ended.remove()
        wrapper.require_backward_grad_sync = True

    return side_by_side(Manual(backward_passes), train, recuts, new_reducers=outside)


class _Gone(torch.autograd.Function):
    """Passes its input on, and no gradient back where ``gone``."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gone: bool) -> torch.Tensor:
        ctx.gone = gone
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (None if ctx.gone else gradient), None


class Undefined(Pair):
    """One weight whose gradient is undefined on some ranks."""

    def __init__(self, gone_on: tuple[int, ...]) -> None:
        super().__init__()
        self.gone_on = gone_on

    def forward(self, values: torch.Tensor) -> Any:
        weight = _Gone.apply(self.first.weight, dist.get_rank() in self.gone_on)
        return self.second(nn.functional.linear(values, weight, self.first.bias))


def undefined_gradients(recuts: Recuts, gone_on: tuple[int, ...], *options: str) -> str | None:
    return side_by_side(Undefined(gone_on), passes, recuts, **switched_on(options))


# Gradients that add up over several backward passes, across re-cuts.


SETTLED = 5
"""Steps after which torch alone carries the buckets."""


def micro_batches(recuts: Recuts, set_to_none: bool, *options: str) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        for _ in range(2):
            with wrapper.no_sync():
                passes(wrapper)
        passes(wrapper)

    given = switched_on(options)
    return side_by_side(layers(), train, recuts, set_to_none=set_to_none, **given)


def sums_of_reduced_gradients(recuts: Recuts, *options: str) -> str | None:
    """Without zeroing, so that each pass adds to gradients that were reduced before."""

    def train(wrapper: Stock, step: int) -> None:
        for _ in range(3):
            passes(wrapper)

    return side_by_side(layers(), train, recuts, **switched_on(options))


def uneven_micro_batches(recuts: Recuts) -> str | None:
    """Each rank has a number of micro batches of its own, of which the last one synchronises."""

    def train(wrapper: Stock, step: int) -> None:
        for _ in range((dist.get_rank() + step) % 2):
            with wrapper.no_sync():
                passes(wrapper)
        passes(wrapper)

    return side_by_side(layers(), train, recuts)


class Branches(Pair):
    """A forward pass takes both, or the first."""

    def forward(self, values: torch.Tensor, both: bool) -> Any:
        return super().forward(values) if both else self.first(values)


def used_without_sync_only(recuts: Recuts, on_ranks: tuple[int, ...], *options: str) -> str | None:
    """A branch takes part in the micro batches that do not synchronise, and on some ranks only."""

    def train(wrapper: Stock, step: int) -> None:
        with wrapper.no_sync():
            backward(wrapper(inputs(), dist.get_rank() in on_ranks))
        backward(wrapper(inputs(), False))

    return side_by_side(Branches(), train, recuts, **switched_on((FIND, *options)))


def static_graph(recuts: Recuts, warm_up_steps: int) -> str | None:
    """Micro batches begin once torch has seen the graph."""

    def train(wrapper: Stock, step: int) -> None:
        if step >= warm_up_steps:
            with wrapper.no_sync():
                passes(wrapper)
        passes(wrapper)

    return side_by_side(layers(), train, recuts, static_graph=True)


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


# Ranks that run out of inputs one by one, under ``join``.


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
    ("flat", two_forward_passes, AS_VIEW),
    ("by-node", two_forward_passes),
    ("flat", forward_without_sync_before_the_backward_pass),
    ("by-node", forward_without_sync_before_the_backward_pass, FIND),
    ("by-node", backward_for_each_output),
    ("flat", forward_on_one_rank, False, True, False),
    ("by-node", forward_on_one_rank, True, True, False),
    ("flat", forward_on_one_rank, True, True, True),
    ("by-node", forward_on_one_rank, True, False, False),
    ("by-node", training_mode_in_turns),
    ("flat", error_after_a_backward_pass_that_broke, 2),
    ("by-node", error_after_a_backward_pass_that_broke, 3),
    ("by-node", reentrant, 1, False, ""),
    ("flat", reentrant, 1, False, TWICE, FIND),
    ("flat", reentrant, 1, False, "", STATIC),
    ("flat", reentrant, 2, False, TWICE),
    ("flat", reentrant, 1, True, UNFINISHED),
    ("by-node", reentrant, 2, True, "", FIND, STATIC),
    ("flat", wrapper_in_a_checkpoint, True),
    ("by-node", wrapper_in_a_checkpoint, False),
    ("flat", passes_inside_forward, 1, True),
    ("by-node", passes_inside_forward, 2, True),
    ("flat", passes_inside_forward, 2, False),
    ("by-node", passes_inside_forward, 1, False),
    ("flat", undefined_gradients, (1,)),
    ("by-node", undefined_gradients, (0, 1, 2, 3), AS_VIEW),
    ("flat", undefined_gradients, (0, 1), FIND, AS_VIEW),
    ("by-node", undefined_gradients, (1,), STATIC),
    ("flat", micro_batches, True, AS_VIEW),
    ("flat", micro_batches, False),
    ("by-node", micro_batches, False, AS_VIEW),
    ("by-node", micro_batches, True),
    ("flat", sums_of_reduced_gradients, AS_VIEW),
    ("by-node", sums_of_reduced_gradients),
    ("by-node", uneven_micro_batches),
    ("flat", used_without_sync_only, (0,), AS_VIEW),
    ("flat", used_without_sync_only, (0, 1)),
    ("by-node", used_without_sync_only, (0, 1, 2, 3), AS_VIEW),
    ("by-node", used_without_sync_only, (0,)),
    ("flat", static_graph, 2),
    ("by-node", static_graph, 99),
    ("by-node", epochs, False, True, 0, 1),
    ("flat", epochs, True, True, 2, 2),
    ("by-node", recuts_between_uneven_epochs),
)
def test_passes_are_torchs(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)
