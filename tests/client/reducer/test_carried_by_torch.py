"""Where torch can carry the buckets as they are, it does so without a hook of ours: with stock's
bits, and with each end of a reduction told once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.tunable.tunable import NOBODY
from bagua_wire.knobs import MIB
from tests.client.listening import EachStep
from tests.ranks import RankPool

WIDTH = 32
SMALL = Configuration(WIDTH * WIDTH * 4)
STEPS = 4
Train = Callable[[nn.Module, int], object]


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 * step + torch.distributed.get_rank())
    model(torch.randn(3, WIDTH)).square().mean().backward()


def accumulating(model: nn.Module, step: int) -> None:
    assert isinstance(model, Stock)
    with model.no_sync():
        backward(model, step + 1000)
    backward(model, step)


def tuned(model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, TunableReducer]:
    """As a job that is being tuned has it, without an agent."""
    ours = DistributedDataParallel(model, **options)
    assert ours.reconfigure(ours.configuration)
    tunable = tunable_of(ours)
    tunable.attach()
    return ours, tunable


class Seen:
    """What our hook was given of some steps, and how many ends of reductions were told."""

    def __init__(self, tunable: TunableReducer) -> None:
        self._tunable = tunable
        self.buckets = self.ends = 0

    def __enter__(self) -> Seen:
        starts = self._tunable.observation.bucket_starts
        self._patch = mock.patch.object(self._tunable.observation, "bucket_starts", wraps=starts)
        self._started = self._patch.start()
        self._tunable.report_to(EachStep(self._end))
        return self

    def _end(self) -> None:
        self.ends += 1

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        self._tunable.report_to(NOBODY)
        self.buckets = self._started.call_count


def settle(ours: DistributedDataParallel, tunable: TunableReducer, train: Train) -> None:
    for step in range(10):
        train(ours, step)
        if tunable.is_settled and step > 1:
            break
    assert tunable.is_settled


def unlike(stock: nn.Module, ours: nn.Module) -> list[str]:
    """The parameters whose gradients are not the same bits."""
    pairs = zip(stock.named_parameters(), ours.named_parameters(), strict=True)
    return [
        name
        for (name, one), (_, other) in pairs
        if (one.grad is None) != (other.grad is None)
        or (one.grad is not None and not torch.equal(one.grad, other.grad))  # type: ignore[arg-type]
    ]


def _beside_stock(
    configuration: Configuration, in_detail: bool, as_view: bool, train: Train
) -> tuple[list[str], int, int, bool]:
    """The gradients that differ from those of stock of the same buckets; the buckets that our hook
    was given, the ends that were told, and whether there is a hook."""
    model = layers()
    twin = copy.deepcopy(model)
    stock = Stock(
        model,
        bucket_cap_mb=configuration.bucket_bytes / MIB,
        gradient_as_bucket_view=as_view,
    )
    ours, tunable = tuned(twin, gradient_as_bucket_view=as_view)
    settle(ours, tunable, train)
    assert ours.reconfigure(configuration)
    tunable.attach(in_detail)
    settle(ours, tunable, train)
    settle(stock, tunable, train)  # type: ignore[arg-type]
    found: list[str] = []
    with Seen(tunable) as seen:
        for step in range(STEPS):
            for wrapper in (stock, ours):
                wrapper.zero_grad()
                train(wrapper, step)
            found += unlike(stock, ours)
    return found, seen.buckets, seen.ends, tunable.is_hooked


@pytest.mark.parametrize(
    ("train", "as_view"),
    [pytest.param(backward, True, marks=pytest.mark.slow), (accumulating, False)],
)
def test_its_gradients_are_stocks_bit_for_bit_without_a_hook(
    three_ranks: RankPool, train: Train, as_view: bool
) -> None:
    found = three_ranks.run(_beside_stock, SMALL, False, as_view, train)
    assert found == [([], 0, STEPS, False)] * 3


@pytest.mark.parametrize(
    ("configuration", "in_detail"),
    [
        pytest.param(SMALL, True, id="observed in detail"),
        pytest.param(Configuration(SMALL.bucket_bytes, channels=2), False, id="on two channels"),
    ],
)
def test_all_else_has_our_hook(
    two_ranks: RankPool, configuration: Configuration, in_detail: bool
) -> None:
    for found, buckets, ends, hooked in two_ranks.run(
        _beside_stock, configuration, in_detail, True, backward
    ):
        assert found == []
        assert hooked
        assert (buckets, ends) == (6 * STEPS, STEPS)


class Mixed(nn.Module):
    """Layers of two dtypes, of which a step may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(3), layers(3).to(torch.bfloat16)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.uses_all = True

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.second(self.first(values).bfloat16()).float()
        found: torch.Tensor = self.spare(values) if self.uses_all else values
        return found


TO_AND_FRO = (
    (SMALL, False),
    (Configuration(1, channels=2), True),
    (Configuration(25 * MIB), False),
    (Configuration(1), False),
    (Configuration(1), True),
    (Configuration(1), False),
    (Configuration(SMALL.bucket_bytes, channels=2), False),
    (SMALL, False),
)


def _to_and_fro(find_unused: bool, train: Train) -> tuple[list[str], list[bool]]:
    """The gradients that differ from stock's, and for each configuration whether it had a hook.
    Two ranks have the same sums in any order."""
    model = Mixed()
    options = {"find_unused_parameters": find_unused}
    stock = Stock(copy.deepcopy(model), **options)
    ours, tunable = tuned(model, **options)
    settle(ours, tunable, train)
    found, hooked = [], []
    for configuration, in_detail in TO_AND_FRO:
        # As the agent does it: at the end of a step.
        tunable.report_to(EachStep(partial(_switch, tunable, configuration, in_detail)))
        for step in range(5):
            for wrapper in (stock, ours):
                wrapper.module.uses_all = not find_unused or step % 2 == 0
                wrapper.zero_grad()
                train(wrapper, step)
            found += [f"{configuration}, step {step}: {name}" for name in unlike(stock, ours)]
        assert tunable.layout.configuration == configuration
        hooked.append(tunable.is_hooked)
    return found, hooked


def _switch(tunable: TunableReducer, configuration: Configuration, in_detail: bool) -> None:
    tunable.report_to(NOBODY)
    tunable.prepare(tunable.plan(configuration))
    tunable.schedule(tunable.plan(configuration))
    tunable.attach(in_detail)


@pytest.mark.parametrize(("find_unused", "train"), [(False, accumulating), (True, backward)])
def test_a_job_may_switch_to_and_fro(two_ranks: RankPool, find_unused: bool, train: Train) -> None:
    expected = [
        find_unused or in_detail or not configuration.is_torchs_way
        for configuration, in_detail in TO_AND_FRO
    ]
    assert two_ranks.run(_to_and_fro, find_unused, train) == [([], expected)] * 2


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers(2), layers(2)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(values), self.right(values)


class Checkpointed(nn.Module):
    """Computes its middle again in a backward pass of its own, inside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.middle, self.end = layers(1), layers(2), layers(1)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        values = checkpoint(self.middle, self.begin(values), use_reentrant=True)
        return (self.end(values),)


class CheckpointedBegin(Checkpointed):
    """The same of its begin, whose gradients come last."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        values = checkpoint(self.begin, values.requires_grad_(), use_reentrant=True)
        return (self.end(self.middle(values)),)


def in_parts(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 * step + torch.distributed.get_rank())
    for output in model(torch.randn(3, WIDTH)):
        output.square().mean().backward()


def _in_parts(kind: Callable[[], nn.Module], reversed_order: bool) -> tuple[list[str], int, int]:
    """The gradients that differ from stock's while each step has other buckets, the ends that were
    told, and the buckets that our hook was given."""
    model = kind()
    stock = Stock(copy.deepcopy(model))
    ours, tunable = tuned(model)
    settle(ours, tunable, in_parts)
    if reversed_order:  # As if another gradient came last: the first one that comes.
        parameters = [tunable.parameters[index] for index in reversed(tunable.order)]
        tunable._ends.follow(parameters)
    tunable.attach(in_detail=False)
    settle(ours, tunable, in_parts)
    found: list[str] = []
    with Seen(tunable) as seen:
        for step in range(STEPS):
            # At an end that is told too early, gradients of the same step would be lost.
            tunable.schedule(tunable.plan((SMALL, Configuration(1))[step % 2]))
            for wrapper in (stock, ours):
                wrapper.zero_grad()
                in_parts(wrapper, step)
            found += unlike(stock, ours)
            assert not tunable.is_recut_due
    return found, seen.ends, seen.buckets


@pytest.mark.parametrize(
    ("kind", "reversed_order"),
    [(Halves, False), (Halves, True), (Checkpointed, True), (CheckpointedBegin, False)],
)
def test_a_step_of_several_backward_passes_has_one_end(
    two_ranks: RankPool, kind: Callable[[], nn.Module], reversed_order: bool
) -> None:
    assert two_ranks.run(_in_parts, kind, reversed_order) == [([], STEPS, 0)] * 2


def _by_hand() -> list[tuple[bool, bool]]:
    """Of a training that nobody observes: whether it has a hook and hooks on gradients, in the
    first step, some time after it, and some time after a change by hand."""
    ours = DistributedDataParallel(layers())
    found = []
    assert ours.reconfigure(SMALL)
    tunable = tunable_of(ours)
    for _ in range(2):
        backward(ours, 0)
        found.append((tunable.is_hooked, tunable._ends.are_followed))
        for step in range(6):
            backward(ours, step)
        found.append((tunable.is_hooked, tunable._ends.are_followed))
        assert ours.reconfigure(Configuration(1))
    return found


def test_without_a_tuning_the_hook_stays_no_longer_than_it_is_needed(two_ranks: RankPool) -> None:
    for first, later, _, again in two_ranks.run(_by_hand):
        assert first[0]
        assert later == again == (False, False)


def _hook_after_a_recut() -> Configuration:
    """Of a training that goes on once a hook has come under which nothing may be re-cut."""
    ours = DistributedDataParallel(layers())
    assert ours.reconfigure(SMALL)
    for step in range(6):
        backward(ours, step)
    assert not tunable_of(ours).is_hooked
    ours.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=100), powerSGD_hook)
    for step in range(3):
        backward(ours, step)
    return ours.configuration


def test_a_hook_that_comes_after_a_recut_finds_the_buckets_as_they_are(two_ranks: RankPool) -> None:
    assert two_ranks.run(_hook_after_a_recut) == [SMALL] * 2
