"""Copies and checkpoints of the wrapper, which other libraries make by torch's own means."""

from __future__ import annotations

import copy
import io

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
from torch.optim.swa_utils import AveragedModel

from bagua_client import DistributedDataParallel
from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import (
    LEARNING_RATE,
    STEPS,
    Recuts,
    difference,
    recut,
    sizes_only,
    wrapped,
)
from tests.client.beside_stock.test_hooks import tripled

pytestmark = pytest.mark.slow

WIDTH = 24


def _layers() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    )


def _step(wrapper: Stock, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(1000 * step + dist.get_rank())
    optimizer.zero_grad()
    wrapper(torch.randn(3, WIDTH)).square().mean().backward()
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


def _deepcopied(wrapper: Stock) -> Stock:
    return copy.deepcopy(wrapper)


def _pickled(wrapper: Stock) -> Stock:
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    loaded: Stock = torch.load(file, weights_only=False)
    return loaded


COPIES = {"deepcopy": _deepcopied, "pickle": _pickled}


def _copied(recuts: Recuts, how: str) -> str | None:
    """A copy trains on like the one it was made of, and both can still be re-cut."""
    stock, ours = wrapped(_layers())
    found = _train(stock, ours, recuts, steps=3)
    twins = COPIES[how](stock), COPIES[how](ours)
    if type(twins[1]) is not DistributedDataParallel:
        return f"the copy is a {type(twins[1])}"
    return found or _train(*twins, recuts) or _train(stock, ours, recuts)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", list(COPIES))
def test_copies_of_the_wrapper(beside_flat: Beside, how: str) -> None:
    beside_flat.check(_copied, how)


def _copied_with_a_hook(recuts: Recuts) -> str | None:
    """Torch's copies leave the hook behind."""
    stock, ours = wrapped(_layers())
    for wrapper in (stock, ours):
        wrapper.register_comm_hook(None, tripled)
    found = _train(stock, ours, sizes_only(recuts[:1]), steps=2)
    twins = copy.deepcopy(stock), copy.deepcopy(ours)
    return found or _train(*twins, sizes_only(recuts[:1]))


def test_a_copy_of_a_wrapper_with_a_hook(beside_flat: Beside) -> None:
    beside_flat.check(_copied_with_a_hook)


def _averaged(recuts: Recuts) -> str | None:
    pair = wrapped(_layers())
    averages = [AveragedModel(wrapper, use_buffers=True) for wrapper in pair]
    for step in range(0, STEPS, 2):
        found = _train(*pair, recuts[step // 2 :], steps=2)
        for average, wrapper in zip(averages, pair, strict=True):
            average.update_parameters(wrapper)
        if found is not None:
            return found
    return difference(averages[0], averages[1], "averaged")


def test_averaged_model(beside_flat: Beside) -> None:
    beside_flat.check(_averaged)


def _checkpointed(recuts: Recuts) -> str | None:
    """What either wrapper saved by torch.distributed.checkpoint, the other one loads."""
    pair = wrapped(_layers())
    found = _train(*pair, recuts, steps=4)
    optimizers = [_sgd(wrapper) for wrapper in pair]
    for wrapper, optimizer in zip(pair, optimizers, strict=True):
        _step(wrapper, optimizer, 0)
    states = [
        copy.deepcopy(get_state_dict(wrapper, optimizer))
        for wrapper, optimizer in zip(pair, optimizers, strict=True)
    ]
    plain = list(pair[0].module.state_dict())
    for wrapper, (model_state, _) in zip(pair, states, strict=True):
        assert list(model_state) == list(get_model_state_dict(wrapper)) == plain
    with torch.no_grad():
        for value in (value for wrapper in pair for value in wrapper.parameters()):
            value.zero_()
    for wrapper, optimizer, (model_state, optimizer_state) in zip(
        pair, optimizers, reversed(states), strict=True
    ):
        # It puts names of its own into the state that it is given.
        set_model_state_dict(wrapper, copy.copy(model_state))
        set_state_dict(
            wrapper,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )
        _step(wrapper, optimizer, 1)
    if not all(bool(value.any()) for value in pair[1].parameters()):
        return "nothing was loaded"
    return found or difference(*pair, "after loading") or _train(*pair, recuts)


def test_distributed_checkpoints_go_both_ways(beside_flat: Beside) -> None:
    beside_flat.check(_checkpointed)


def _states(recuts: Recuts) -> str | None:
    """The plain state_dict, alone and inside a larger module."""
    stock, ours = wrapped(_layers())
    found = _train(stock, ours, recuts, steps=4)
    larger = [nn.ModuleDict({"part": wrapper, "head": _layers()}) for wrapper in (stock, ours)]
    assert list(larger[0].state_dict()) == list(larger[1].state_dict())
    assert list(stock.state_dict()) == list(ours.state_dict())
    saved = copy.deepcopy([module.state_dict() for module in larger])
    with torch.no_grad():
        for value in (value for module in larger for value in module.parameters()):
            value.zero_()
    larger[0].load_state_dict(saved[1])
    larger[1].load_state_dict(saved[0])
    if not all(bool(value.any()) for value in ours.parameters()):
        return "nothing was loaded"
    larger[1]["head"] = larger[0]["head"]
    return found or difference(*larger, "loaded") or _train(stock, ours, recuts)


def test_states_go_both_ways(beside_flat: Beside) -> None:
    beside_flat.check(_states)


def _unwrapped(recuts: Recuts) -> str | None:
    """As Accelerate finds the model inside its wrappers."""
    model = _layers()
    stock, ours = wrapped(model)
    found = _train(stock, ours, recuts, steps=3)
    inner: nn.Module = ours
    while isinstance(inner, Stock | nn.DataParallel):
        inner = inner.module
    if type(inner) is not nn.Sequential:
        return f"unwrapped to a {type(inner)}"
    return found or difference(model, inner, "unwrapped")


def test_the_model_is_unwrapped_as_from_torchs_class(beside_flat: Beside) -> None:
    beside_flat.check(_unwrapped)
