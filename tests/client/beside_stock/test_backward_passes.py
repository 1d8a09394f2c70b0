"""Forward and backward passes that do not come in pairs, or that break."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from tests.client.beside_stock.conftest import Beside
from tests.client.beside_stock.side_by_side import Recuts, side_by_side

pytestmark = pytest.mark.slow

WIDTH = 24


def inputs(grad: bool = False) -> torch.Tensor:
    return torch.randn(3, WIDTH, requires_grad=grad)


UNFINISHED = "Expected to have finished reduction in the prior iteration"


def backward(output: torch.Tensor) -> None:
    output.square().mean().backward()


class Scaled(nn.Module):
    """Uses a buffer that autograd saves, and changes it in the next forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(values) * self.scale
        return result


def _two_forwards(recuts: Recuts, as_view: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        first, second = wrapper(inputs()), wrapper(inputs())
        backward(first + second)

    return side_by_side(Scaled(), train, recuts, gradient_as_bucket_view=as_view)


@pytest.mark.parametrize("as_view", [True, False])
def test_two_forward_passes_before_one_backward_pass(beside: Beside, as_view: bool) -> None:
    beside.check(_two_forwards, as_view)


def _backward_of_the_first(recuts: Recuts, find: bool) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        first = wrapper(inputs())
        with wrapper.no_sync():
            wrapper(inputs())
        backward(first)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return side_by_side(model, train, recuts, find_unused_parameters=find)


@pytest.mark.parametrize("find", [True, False])
def test_a_forward_pass_without_sync_before_the_backward_pass_of_the_first(
    beside: Beside, find: bool
) -> None:
    beside.check(_backward_of_the_first, find)


def _backward_in_parts(recuts: Recuts) -> str | None:
    """One forward pass, and a backward pass for each half of the model."""

    def train(wrapper: Stock, step: int) -> None:
        for output in wrapper(inputs()):
            backward(output)

    return side_by_side(Halves(), train, recuts)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(values), self.right(values)


def test_a_backward_pass_for_each_output(beside: Beside) -> None:
    beside.check(_backward_in_parts)


def _forward_on_one_rank(recuts: Recuts, grad: bool, trains: bool, validates: bool) -> str | None:
    """The first rank looks at an output while the others wait for it, after a re-cut and a step.

    Args:
        trains: whether the model trains in training mode.
        validates: whether it is validated in it.
    """

    def alone(wrapper: Stock) -> None:
        if torch.distributed.get_rank() == 0:
            wrapper.train(validates)
            with torch.set_grad_enabled(grad):
                wrapper(inputs())
            wrapper.train(trains)
        torch.distributed.barrier()

    def train(wrapper: Stock, step: int) -> None:
        alone(wrapper)
        backward(wrapper(inputs()))
        alone(wrapper)

    # Torch cuts its own buckets for good in whatever forward pass comes second.
    def wrap(wrapper: type[Stock], module: nn.Module) -> Stock:
        made = wrapper(module.train(trains))
        for _ in range(2):
            backward(made(torch.ones(1, WIDTH)))
        return made

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return side_by_side(model, train, recuts, wrap=wrap)


@pytest.mark.parametrize(
    ("grad", "trains", "validates"),
    [(False, True, False), (True, True, False), (True, True, True), (True, False, False)],
)
def test_a_forward_pass_on_one_rank_only(
    beside: Beside, grad: bool, trains: bool, validates: bool
) -> None:
    beside.check(_forward_on_one_rank, grad, trains, validates)


def _in_turns(recuts: Recuts) -> str | None:
    """Each step in the other mode; every other one accumulates."""

    def train(wrapper: Stock, step: int) -> None:
        wrapper.train(step % 3 == 1)
        if step % 2:
            with wrapper.no_sync():
                backward(wrapper(inputs()))
        backward(wrapper(inputs()))

    return side_by_side(Scaled(), train, recuts)


def test_steps_in_training_mode_and_not_in_turns(beside: Beside) -> None:
    beside.check(_in_turns)


class _Broken(torch.autograd.Function):
    """Its backward pass raises while it is told to."""

    told = False

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> torch.Tensor:
        if _Broken.told:
            raise ArithmeticError("broken")
        return gradient


class Breaking(nn.Module):
    """Breaks in the middle of its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(_Broken.apply(self.first(values)))
        return result


def _broken(recuts: Recuts, at_step: int) -> str | None:
    def train(wrapper: Stock, step: int) -> None:
        output = wrapper(inputs())
        _Broken.told = step == at_step
        with pytest.raises(ArithmeticError) if _Broken.told else nullcontext():
            backward(output)

    return side_by_side(Breaking(), train, recuts, error=UNFINISHED)


@pytest.mark.parametrize("at_step", [2, 3])
def test_the_error_after_a_backward_pass_that_broke(beside: Beside, at_step: int) -> None:
    beside.check(_broken, at_step)
