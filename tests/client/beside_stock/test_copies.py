"""Copies and checkpoints of the wrapper, which other libraries make by torch's own means."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel
from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    LEARNING_RATE,
    STEPS,
    Recuts,
    difference,
    normed,
    passes,
    recut,
    sizes_only,
    wrapped,
)
from tests.client.beside_stock.test_hooks import tripled

pytestmark = pytest.mark.slow


def _step(wrapper: Stock, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    passes(wrapper)
    optimizer.step()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.5)


def _train(
    stock: Stock, ours: DistributedDataParallel, recuts: Recuts, steps: int = STEPS
) -> str | None:
    optimizers = _sgd(stock), _sgd(ours)
    for step in range(steps):
        if recuts and step % 2 == 0:
            recut(ours, recuts, step)
        for wrapper, optimizer in zip((stock, ours), optimizers, strict=True):
            _step(wrapper, optimizer, step)
    return difference(stock, ours, "after training")


def _pickled(wrapper: Stock) -> Stock:
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    loaded: Stock = torch.load(file, weights_only=False)
    return loaded


def copied(recuts: Recuts, made: Callable[[Any], Any]) -> str | None:
    """A copy trains on like the one it was made of, and both can still be re-cut."""
    stock, ours = wrapped(normed())
    found = _train(stock, ours, recuts, steps=3)
    twins = made(stock), made(ours)
    if type(twins[1]) is not DistributedDataParallel:
        return f"the copy is a {type(twins[1])}"
    return found or _train(*twins, recuts) or _train(stock, ours, recuts)


def copied_with_a_hook(recuts: Recuts) -> str | None:
    """Torch's copies leave the hook behind."""
    stock, ours = wrapped(normed())
    for wrapper in (stock, ours):
        wrapper.register_comm_hook(None, tripled)
    found = _train(stock, ours, sizes_only(recuts[:1]), steps=2)
    twins = copy.deepcopy(stock), copy.deepcopy(ours)
    return found or _train(*twins, sizes_only(recuts[:1]))


def _zero(*modules: nn.Module) -> None:
    with torch.no_grad():
        for value in (value for module in modules for value in module.parameters()):
            value.zero_()


def distributed_checkpoints(recuts: Recuts) -> str | None:
    """What either wrapper saved by torch.distributed.checkpoint, the other one loads."""
    pair = wrapped(normed())
    found = _train(*pair, recuts, steps=4)
    both = [(wrapper, _sgd(wrapper)) for wrapper in pair]
    for wrapper, optimizer in both:
        _step(wrapper, optimizer, 0)
    states = [copy.deepcopy(get_state_dict(wrapper, optimizer)) for wrapper, optimizer in both]
    plain = list(pair[0].module.state_dict())
    for wrapper, (weights, _) in zip(pair, states, strict=True):
        assert list(weights) == list(get_model_state_dict(wrapper)) == plain
    _zero(*pair)
    for (wrapper, optimizer), (weights, moments) in zip(both, reversed(states), strict=True):
        # It puts names of its own into the state that it is given.
        set_model_state_dict(wrapper, copy.copy(weights))
        set_state_dict(wrapper, optimizer, model_state_dict=weights, optim_state_dict=moments)
        _step(wrapper, optimizer, 1)
    if not all(bool(value.any()) for value in pair[1].parameters()):
        return "nothing was loaded"
    return found or difference(*pair, "after loading") or _train(*pair, recuts)


def plain_states(recuts: Recuts) -> str | None:
    """Alone and inside a larger module."""
    stock, ours = wrapped(normed())
    found = _train(stock, ours, recuts, steps=4)
    larger = [nn.ModuleDict({"part": wrapper, "head": normed()}) for wrapper in (stock, ours)]
    assert list(larger[0].state_dict()) == list(larger[1].state_dict())
    assert list(stock.state_dict()) == list(ours.state_dict())
    saved = copy.deepcopy([module.state_dict() for module in larger])
    _zero(*larger)
    larger[0].load_state_dict(saved[1])
    larger[1].load_state_dict(saved[0])
    if not all(bool(value.any()) for value in ours.parameters()):
        return "nothing was loaded"
    larger[1]["head"] = larger[0]["head"]
    return found or difference(*larger, "loaded") or _train(stock, ours, recuts)


@table(
    ("flat", copied, copy.deepcopy),
    ("flat", copied, _pickled),
    ("flat", copied_with_a_hook),
    ("flat", distributed_checkpoints),
    ("flat", plain_states),
)
def test_copies_and_states_are_torchs(beside: Beside, compare: Any, arguments: Any) -> None:
    beside.check(compare, *arguments)
