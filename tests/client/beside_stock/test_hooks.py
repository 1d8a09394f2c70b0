"""Communication hooks of the training's own, registered before it and in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock

from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    Recuts,
    difference,
    layers,
    passes,
    recut,
    side_by_side,
    sizes_only,
    wrapped,
)

pytestmark = pytest.mark.slow

MIDDLE = 3
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def tripled(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Three times the mean, so that nobody takes another's sum for it."""
    flat = bucket.buffer().mul_(3 / dist.get_world_size())
    work = dist.all_reduce(flat, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# Torch compares the annotations of a hook with types, not with their names.
tripled.__annotations__ = get_type_hints(tripled)


def python_hook(recuts: Recuts, hook: Hook, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            wrapper.register_comm_hook(None, hook)
        passes(wrapper)

    return side_by_side(layers(), train, sizes_only(recuts), rounding=torch.float16)


def refused_hook(recuts: Recuts, at_step: int) -> str | None:
    """Training goes on as it was after a hook that torch refuses for its annotation."""

    def strange(state: object, bucket: str) -> None:
        raise AssertionError("nobody calls it")

    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            with pytest.raises(ValueError, match="bucket annotation"):
                wrapper.register_comm_hook(None, strange)
        passes(wrapper)

    return side_by_side(layers(), train, recuts)


def two_hooks(recuts: Recuts) -> str | None:
    """Torch takes one only; the first one stays in force."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 0:
            wrapper.register_comm_hook(None, tripled)
        if step == 1:
            with pytest.raises(RuntimeError, match="can only be called once"):
                wrapper.register_comm_hook(None, default_hooks.allreduce_hook)
        passes(wrapper)

    return side_by_side(layers(), train, sizes_only(recuts))


def hook_while_a_recut_is_due(recuts: Recuts) -> str | None:
    """The hook comes while buckets travel by a way of ours, or just before they would."""

    def train(wrapper: Stock, step: int) -> None:
        if step == 2:
            wrapper.register_comm_hook(None, tripled)
        passes(wrapper)

    found = []
    for first in range(len(recuts)):
        pair = wrapped(layers())
        for step in range(5):
            if step in (0, 2):
                recut(pair[1], recuts, 2 * first + step)
            for wrapper in pair:
                torch.manual_seed(1000 * step + dist.get_rank())
                wrapper.zero_grad()
                train(wrapper, step)
            found.append(difference(*pair, f"from {recuts[first]}, step {step}"))
    return next((text for text in found if text), None)


def hook_in_cpp(recuts: Recuts, name: str, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            wrapper._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
        passes(wrapper)

    return side_by_side(layers(), train, sizes_only(recuts), rounding=torch.float16)


def power_sgd(recuts: Recuts, at_step: int) -> str | None:
    """What it remembers is cut like the buckets, which therefore stay as they are."""
    stock, ours = wrapped(layers())

    def train(wrapper: Stock, step: int) -> None:
        if step == at_step:
            state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
            wrapper.register_comm_hook(state, powerSGD_hook)
        passes(wrapper)

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


@table(
    ("flat", python_hook, tripled, 0),
    ("flat", python_hook, default_hooks.fp16_compress_hook, MIDDLE),
    ("by-node", refused_hook, MIDDLE),
    ("flat", two_hooks),
    ("flat", hook_while_a_recut_is_due),
    ("by-node", hook_while_a_recut_is_due),
    ("flat", hook_in_cpp, "ALLREDUCE", MIDDLE),
    ("flat", hook_in_cpp, "FP16_COMPRESS", 0),
    ("flat", power_sgd, 0),
    ("by-node", power_sgd, MIDDLE),
)
def test_hooks_of_the_training_are_torchs(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)
