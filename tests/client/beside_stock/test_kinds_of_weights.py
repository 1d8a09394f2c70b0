"""Weights that are not plain: shared, sparse, of two dtypes, ignored, with their own optimizer."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _reducer_allreduce_and_upcast_hook,
)
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.parallel.distributed import _MixedPrecision

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.reducer.offer import refusal_of
from bagua_client.torch_private.reducer import caps_of
from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import (
    LEARNING_RATE,
    STEPS,
    Recuts,
    difference,
    recut,
    side_by_side,
    sizes_only,
    wrapped,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WIDTH = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of what torch has for CUDA only; on the CPU it fails, and so must ours."""


def _backward(wrapper: Stock, step: int) -> None:
    wrapper(torch.randn(3, WIDTH, device=wrapper.device)).square().mean().backward()


def _layers(*dtypes: torch.dtype) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes))


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out_of = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out_of.weight = self.into.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out_of(torch.tanh(self.into(values)))
        return result


def _tied(recuts: Recuts) -> str | None:
    return side_by_side(Tied(), _backward, recuts)


def test_tied_weights(beside: Beside) -> None:
    beside.check(_tied)


class TwoDtypes(nn.Module):
    """Layers of float32 and of float64 in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(torch.float32, torch.float64, torch.float32, torch.float64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values.to(layer.weight.dtype)))
        return values


def _two_dtypes(recuts: Recuts, as_view: bool) -> str | None:
    return side_by_side(TwoDtypes(), _backward, recuts, gradient_as_bucket_view=as_view)


@pytest.mark.parametrize("as_view", [True, False])
def test_two_dtypes(beside: Beside, as_view: bool) -> None:
    beside.check(_two_dtypes, as_view)


def _complex(recuts: Recuts) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        wrapper(torch.randn(3, WIDTH, dtype=torch.complex64)).abs().square().mean().backward()

    return side_by_side(_layers(torch.complex64, torch.complex64), train, recuts)


def test_complex_weights(beside: Beside) -> None:
    beside.check(_complex)


class Words(nn.Module):
    """An embedding with sparse gradients before a layer with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.words(indices))
        return result


def _sparse(recuts: Recuts, find: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        wrapper(torch.randint(40, (3, 4))).square().mean().backward()

    def without_momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), LEARNING_RATE)

    return side_by_side(
        Words(), train, recuts, optimizer_of=without_momentum, find_unused_parameters=find
    )


@pytest.mark.parametrize("find", [True, False])
def test_sparse_gradients(beside: Beside, find: bool) -> None:
    beside.check(_sparse, find)


def _ignored(recuts: Recuts) -> str | None:
    """Each rank trains the ignored weights on its own, and keeps its own buffer."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    Stock._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "1.running_mean"])
    return side_by_side(model, _backward, recuts)


def test_ignored_weights_and_buffers(beside: Beside) -> None:
    beside.check(_ignored)


def _delayed(recuts: Recuts) -> str | None:
    """Some gradients travel with those of another weight, outside torch's reducer."""

    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        delayed = [(f"1.{name}", value) for name, value in module[1].named_parameters()]
        return wrapper(
            module,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=module[0].weight,
        )

    def train(wrapper: Stock, step: int) -> None:
        works = []

        def kept(*args: Any, **kwargs: Any) -> dist.Work | None:
            works.append(all_reduce(*args, **kwargs))
            return works[-1]

        with mock.patch.object(dist, "all_reduce", kept):
            _backward(wrapper, step)
        # Torch itself does not wait for what it sends so; on CUDA the stream does.
        for work in works:
            if work is not None:
                work.wait()

    all_reduce = dist.all_reduce
    return side_by_side(_layers(*[torch.float32] * 3), train, recuts, wrap=wrap)


def test_weights_whose_reduction_is_delayed(beside: Beside) -> None:
    beside.check(_delayed)


def _optimizer_in_backward(recuts: Recuts, as_view: bool) -> str | None:
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        _apply_optimizer_in_backward(
            torch.optim.SGD, module.parameters(), {"lr": LEARNING_RATE, "momentum": 0.5}
        )
        return wrapper(module, gradient_as_bucket_view=as_view)

    def none(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)])

    return side_by_side(
        _layers(*[torch.float32] * 3).to(DEVICE),
        _backward,
        sizes_only(recuts),
        wrap=wrap,
        optimizer_of=none,
        error="" if torch.cuda.is_available() else "Cannot access accelerator device",
    )


NEEDS_GPU = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch's own class needs a GPU for it in a build that has CUDA",
)


@NEEDS_GPU
@pytest.mark.parametrize("as_view", [True, False])
def test_optimizers_applied_in_the_backward_pass(beside: Beside, as_view: bool) -> None:
    beside.check(_optimizer_in_backward, as_view)


def _mixed_precision() -> str | None:
    precision = _MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
    )
    return side_by_side(
        _layers(torch.float32, torch.float32).to(DEVICE),
        _backward,
        (),
        error="" if torch.cuda.is_available() else "cpu backend doesn't support events",
        mixed_precision=precision,
    )


@NEEDS_GPU
def test_mixed_precision(pair_of_ranks: RankPool) -> None:
    """Torch's own class is wrong in its first pass, so this says only that ours is no worse."""
    assert pair_of_ranks.run(_mixed_precision) == [None, None]


def _recut_under_mixed_precision() -> tuple[str, bool]:
    """With the hook alone: only a GPU can train with it."""
    model = DistributedDataParallel(_layers(torch.float32))
    model.register_comm_hook(object(), _reducer_allreduce_and_upcast_hook)
    return refusal_of(model, caps_of(model)), model.reconfigure(Configuration(bucket_bytes=1024))


def test_mixed_precision_is_not_recut(pair_of_ranks: RankPool) -> None:
    for refusal, is_recut in pair_of_ranks.run(_recut_under_mixed_precision):
        assert "wrong in the first pass" in refusal
        assert not is_recut


def _two_wrappers(recuts: Recuts, as_view: bool) -> str | None:
    """Both wrap the same module, and are used in turn."""
    module = _layers(*[torch.float32] * 3)
    stock, ours = wrapped(module, gradient_as_bucket_view=as_view)
    others = (
        Stock(stock.module, gradient_as_bucket_view=as_view),
        DistributedDataParallel(ours.module, gradient_as_bucket_view=as_view),
    )
    for step in range(STEPS):
        turn = (others, (stock, ours))[step % 3 == 0]
        if recuts and step % 2 == 0:
            recut(ours, recuts, step)
            recut(others[1], recuts, step + 2)
        for wrapper in turn:
            torch.manual_seed(1000 * step + dist.get_rank())
            wrapper.zero_grad()
            _backward(wrapper, step)
        found = difference(stock, ours, f"step {step}")
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("as_view", [True, False])
def test_two_wrappers_of_one_module(beside: Beside, as_view: bool) -> None:
    beside.check(_two_wrappers, as_view)
