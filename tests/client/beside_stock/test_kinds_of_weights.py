"""Weights that are not plain: shared, sparse, of two dtypes, in two wrappers."""

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
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.reducer.offer import refusal_of
from bagua_client.torch_private.reducer import caps_of
from tests.client.beside_stock.conftest import Beside, table
from tests.client.beside_stock.side_by_side import (
    LEARNING_RATE,
    STEPS,
    WIDTH,
    Recuts,
    difference,
    recut,
    side_by_side,
    wrapped,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


def _backward(wrapper: Stock, step: int) -> None:
    wrapper(torch.randn(3, WIDTH)).square().mean().backward()


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


def tied_weights(recuts: Recuts) -> str | None:
    return side_by_side(Tied(), _backward, recuts)


class TwoDtypes(nn.Module):
    """Layers of float32 and of float64 in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(torch.float32, torch.float64, torch.float32, torch.float64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.tanh(layer(values.to(layer.weight.dtype)))
        return values


def two_dtypes(recuts: Recuts, as_view: bool) -> str | None:
    return side_by_side(TwoDtypes(), _backward, recuts, gradient_as_bucket_view=as_view)


def complex_weights(recuts: Recuts) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        wrapper(torch.randn(3, WIDTH, dtype=torch.complex64)).abs().square().mean().backward()

    return side_by_side(_layers(torch.complex64, torch.complex64), train, recuts)


class Words(nn.Module):
    """An embedding with sparse gradients before a layer with dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(self.words(indices))
        return result


def sparse_gradients(recuts: Recuts, find: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        wrapper(torch.randint(40, (3, 4))).square().mean().backward()

    def without_momentum(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), LEARNING_RATE)

    return side_by_side(
        Words(), train, recuts, optimizer_of=without_momentum, find_unused_parameters=find
    )


def weights_whose_reduction_is_delayed(recuts: Recuts) -> str | None:
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


def two_wrappers_of_one_module(recuts: Recuts, as_view: bool) -> str | None:
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


@table(
    ("by-node", tied_weights),
    ("flat", two_dtypes, True),
    ("by-node", two_dtypes, False),
    ("flat", complex_weights),
    ("flat", sparse_gradients, True),
    ("by-node", sparse_gradients, False),
    ("flat", weights_whose_reduction_is_delayed),
    ("flat", two_wrappers_of_one_module, True),
    ("by-node", two_wrappers_of_one_module, False),
)
def test_weights_that_are_not_plain_are_reduced_as_by_torch(
    beside: Beside, compare: Any, arguments: Any
) -> None:
    beside.check(compare, *arguments)


def _recut_under_mixed_precision() -> tuple[str, bool]:
    """With the hook alone: only a GPU can train with it."""
    model = DistributedDataParallel(_layers(torch.float32))
    model.register_comm_hook(object(), _reducer_allreduce_and_upcast_hook)
    return refusal_of(model, caps_of(model)), model.reconfigure(Configuration(bucket_bytes=1024))


def test_mixed_precision_is_not_recut(pair_of_ranks: RankPool) -> None:
    for refusal, is_recut in pair_of_ranks.run(_recut_under_mixed_precision):
        assert "wrong in the first pass" in refusal
        assert not is_recut
