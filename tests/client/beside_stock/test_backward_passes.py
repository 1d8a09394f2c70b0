"""Forward and backward passes that do not come in pairs, that break, or that run inside others:
activation checkpoints, and steps that a model makes itself."""

from __future__ import annotations

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

from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    UNFINISHED,
    WIDTH,
    Recuts,
    backward,
    inputs,
    passes,
    side_by_side,
)

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


def two_forward_passes(recuts: Recuts, as_view: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        backward(wrapper(inputs()) + wrapper(inputs()))

    return side_by_side(Scaled(), train, recuts, gradient_as_bucket_view=as_view)


def forward_without_sync_before_the_backward_pass(recuts: Recuts, find: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        first = wrapper(inputs())
        with wrapper.no_sync():
            wrapper(inputs())
        backward(first)

    return side_by_side(Pair(), train, recuts, find_unused_parameters=find)


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


@table(
    ("flat", two_forward_passes, True),
    ("by-node", two_forward_passes, False),
    ("flat", forward_without_sync_before_the_backward_pass, False),
    ("by-node", forward_without_sync_before_the_backward_pass, True),
    ("by-node", backward_for_each_output),
    ("flat", forward_on_one_rank, False, True, False),
    ("by-node", forward_on_one_rank, True, True, False),
    ("flat", forward_on_one_rank, True, True, True),
    ("by-node", forward_on_one_rank, True, False, False),
    ("by-node", training_mode_in_turns),
    ("flat", error_after_a_backward_pass_that_broke, 2),
    ("by-node", error_after_a_backward_pass_that_broke, 3),
)
def test_passes_that_come_in_no_pairs_are_torchs(
    beside: Beside, compare: Any, arguments: Any
) -> None:
    beside.check(compare, *arguments)


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
    recuts: Recuts, times: int, has_unused: bool, find: bool, static: bool, error: str = ""
) -> str | None:
    options = {"find_unused_parameters": find, "static_graph": static}
    return side_by_side(Checkpointed(times, has_unused), passes, recuts, error=error, **options)


def wrapper_in_a_checkpoint(recuts: Recuts, is_reentrant: bool) -> str | None:
    """The re-cut is due in a forward pass that a backward pass runs."""

    def train(wrapper: Stock, step: int) -> None:
        backward(checkpoint(wrapper, inputs(grad=True), use_reentrant=is_reentrant))

    return side_by_side(nn.Linear(WIDTH, WIDTH), train, recuts)


TWICE = "Expected to mark a variable ready only once"


@table(
    ("by-node", reentrant, 1, False, False, False),
    ("flat", reentrant, 1, False, True, False, TWICE),
    ("flat", reentrant, 1, False, False, True),
    ("flat", reentrant, 2, False, False, False, TWICE),
    ("flat", reentrant, 1, True, False, False, UNFINISHED),
    ("by-node", reentrant, 2, True, True, True),
    ("flat", wrapper_in_a_checkpoint, True),
    ("by-node", wrapper_in_a_checkpoint, False),
)
def test_checkpoints_are_torchs(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)


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


def undefined_gradients(
    recuts: Recuts, gone_on: tuple[int, ...], find: bool, static: bool, as_view: bool
) -> str | None:
    return side_by_side(
        Undefined(gone_on),
        passes,
        recuts,
        find_unused_parameters=find,
        static_graph=static,
        gradient_as_bucket_view=as_view,
    )


@table(
    ("flat", passes_inside_forward, 1, True),
    ("by-node", passes_inside_forward, 2, True),
    ("flat", passes_inside_forward, 2, False),
    ("by-node", passes_inside_forward, 1, False),
    ("flat", undefined_gradients, (1,), False, False, False),
    ("by-node", undefined_gradients, (0, 1, 2, 3), False, False, True),
    ("flat", undefined_gradients, (0, 1), True, False, True),
    ("by-node", undefined_gradients, (1,), False, True, False),
)
def test_what_a_model_does_itself_is_torchs(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)
