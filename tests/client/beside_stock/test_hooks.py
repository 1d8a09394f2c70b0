"""Communication hooks of the training's own, registered before it and in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _BufferCommHookLocation

from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import (
    Recuts,
    difference,
    recut,
    side_by_side,
    sizes_only,
    wrapped,
)

pytestmark = pytest.mark.slow

WIDTH = 24
MIDDLE = 3
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def _backward(wrapper: Stock, step: int) -> None:
    wrapper(torch.randn(3, WIDTH)).square().mean().backward()


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def tripled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Three times the mean, so that nobody takes another's sum for it."""
    flat = bucket.buffer().mul_(3 / dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# Torch compares the annotations of a hook with types, not with their names.
tripled.__annotations__ = get_type_hints(tripled)


def _with_hook(recuts: Recuts, hook: Hook, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            wrapper.register_comm_hook(None, hook)
        _backward(wrapper, step)

    return side_by_side(_layers(), train, sizes_only(recuts), rounding=torch.float16)


@pytest.mark.parametrize("at_step", [0, MIDDLE])
@pytest.mark.parametrize("hook", [tripled, default_hooks.fp16_compress_hook])
def test_a_hook(beside: Beside, hook: Hook, at_step: int) -> None:
    beside.check(_with_hook, hook, at_step)


def _with_refused_hook(recuts: Recuts, hook: Hook, at_step: int) -> str | None:
    """Training goes on as it was after a hook that torch refuses."""

    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            with pytest.raises(TypeError):
                wrapper.register_comm_hook(None, hook)
        _backward(wrapper, step)

    return side_by_side(_layers(), train, recuts)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch takes the hook with CUDA")
@pytest.mark.parametrize("at_step", [0, MIDDLE])
def test_a_hook_that_torch_refuses(beside: Beside, at_step: int) -> None:
    beside.check(_with_refused_hook, default_hooks.bf16_compress_hook, at_step)


def _with_two_hooks(recuts: Recuts) -> str | None:
    """Torch takes one only; the first one stays in force."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 0:
            wrapper.register_comm_hook(None, tripled)
        if step == 1:
            with pytest.raises(RuntimeError, match="can only be called once"):
                wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
        _backward(wrapper, step)

    return side_by_side(_layers(), train, sizes_only(recuts))


def test_a_second_hook(beside: Beside) -> None:
    beside.check(_with_two_hooks)


def _in_the_middle_of_anything(recuts: Recuts) -> str | None:
    """The hook comes while buckets travel by a way of ours, or just before they would."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 2:
            wrapper.register_comm_hook(None, tripled)
        _backward(wrapper, step)

    found = []
    for first in range(len(recuts)):
        pair = wrapped(_layers())
        for step in range(5):
            if step in (0, 2):
                recut(pair[1], recuts, 2 * first + step)
            for wrapper in pair:
                torch.manual_seed(1000 * step + dist.get_rank())
                wrapper.zero_grad()
                train(wrapper, step)
            found.append(difference(*pair, f"from {recuts[first]}, step {step}"))
    return next((text for text in found if text), None)


def test_a_hook_that_comes_when_a_recut_is_due(beside: Beside) -> None:
    beside.check(_in_the_middle_of_anything)


def _builtin(recuts: Recuts, name: str, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            wrapper._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
        _backward(wrapper, step)

    return side_by_side(_layers(), train, sizes_only(recuts), rounding=torch.float16)


@pytest.mark.parametrize("at_step", [0, MIDDLE])
@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_a_hook_written_in_cpp(beside: Beside, name: str, at_step: int) -> None:
    beside.check(_builtin, name, at_step)


def _power_sgd(recuts: Recuts, at_step: int) -> str | None:
    """What it remembers is cut like the buckets, which therefore stay as they are."""
    stock, ours = wrapped(_layers())

    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
            wrapper.register_comm_hook(state, powerSGD_hook)
        _backward(wrapper, step)

    found = None
    for step in range(10):
        if step > at_step and step % 3 == 0:
            for configuration in sizes_only(recuts)[:1]:
                with suppress(RuntimeError):
                    if ours.reconfigure(configuration):
                        found = found or f"step {step}: the buckets would be re-cut"
        for wrapper in (stock, ours):
            torch.manual_seed(1000 * step + dist.get_rank())
            wrapper.zero_grad()
            train(wrapper, step)
        found = found or difference(stock, ours, f"step {step}")
    return found


@pytest.mark.parametrize("at_step", [0, MIDDLE])
def test_power_sgd(beside: Beside, at_step: int) -> None:
    beside.check(_power_sgd, at_step)


def _buffer_hook(recuts: Recuts, place: str) -> str | None:
    """Buffers are added up over the ranks instead of taken from the first one."""

    def added_up(state: object, buffers: dict[str, torch.Tensor]) -> list[Any] | None:
        works = [
            dist.all_reduce(buffer, async_op=True)
            for buffer in buffers.values()
            if buffer.is_floating_point()
        ]
        if place == "POST_FORWARD":
            # Torch waits for these at the end of the backward pass.
            return [work.get_future() for work in works]
        for work in works:
            work.wait()
        return None

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module)
        made._register_buffer_comm_hook(None, added_up, getattr(_BufferCommHookLocation, place))
        return made

    def train(wrapper: Stock, step: int) -> None:
        _backward(wrapper, step)
        with torch.no_grad():
            for buffer in wrapper.buffers():
                buffer.clamp_(max=5)

    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    return side_by_side(model, train, recuts, wrap=wrap)


@pytest.mark.parametrize("place", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_hook_for_buffers(beside: Beside, place: str) -> None:
    beside.check(_buffer_hook, place)
