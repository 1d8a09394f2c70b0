"""What a model does itself: backward passes inside ``forward``, gradients that are undefined."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import Recuts, side_by_side
from tests.client.beside_stock.test_backward_passes import WIDTH, backward, inputs

pytestmark = pytest.mark.slow

# Backward passes inside forward, as Lightning's manual optimization runs them


class Manual(nn.Module):
    """A training step in ``forward``; ``wrapper`` is told of each backward pass in it."""

    def __init__(self, backward_passes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.backward_passes = backward_passes
        self.announce: Callable[[], None] | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        loss = values.sum()
        for _ in range(self.backward_passes):
            loss = self.layers(values).square().mean()
            assert self.announce is not None
            self.announce()
            loss.backward()
        return loss.detach()


def _manual(recuts: Recuts, backward_passes: int, outside: bool) -> str | None:
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


@pytest.mark.parametrize("backward_passes", [1, 2])
@pytest.mark.parametrize("outside", [True, False])
def test_backward_passes_inside_forward(
    beside: Beside, backward_passes: int, outside: bool
) -> None:
    beside.check(_manual, backward_passes, outside)


# Gradients that are undefined


class _Gone(torch.autograd.Function):
    """Passes its input on, and no gradient back where ``gone``."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, value: torch.Tensor, gone: bool
    ) -> torch.Tensor:
        ctx.gone = gone  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, None]:
        return (None if ctx.gone else gradient), None  # type: ignore[attr-defined]


class Undefined(nn.Module):
    """One weight whose gradient is undefined on some ranks."""

    def __init__(self, gone_on: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gone_on = gone_on

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        gone = torch.distributed.get_rank() in self.gone_on
        weight = _Gone.apply(self.first.weight, gone)
        result: torch.Tensor = self.second(nn.functional.linear(values, weight, self.first.bias))
        return result


def _undefined(
    recuts: Recuts, gone_on: tuple[int, ...], find: bool, static: bool, as_view: bool
) -> str | None:
    return side_by_side(
        Undefined(gone_on),
        lambda wrapper, step: backward(wrapper(inputs())),
        recuts,
        find_unused_parameters=find,
        static_graph=static,
        gradient_as_bucket_view=as_view,
    )


@pytest.mark.parametrize("gone_on", [(1,), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    ("find", "static", "as_view"),
    [(False, False, False), (False, False, True), (True, False, True), (False, True, False)],
)
def test_undefined_gradients(
    beside: Beside, gone_on: tuple[int, ...], find: bool, static: bool, as_view: bool
) -> None:
    beside.check(_undefined, gone_on, find, static, as_view)
