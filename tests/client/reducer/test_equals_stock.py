"""Gradients and weights are those of torch's DistributedDataParallel, whatever is configured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagua_client import Configuration
from bagua_client.reducer import carrier
from bagua_wire.knobs import CHANNELS_VALUES, KNOBS
from tests.client.comparison import Summands, difference, pair
from tests.client.setting import Setting
from tests.ranks import RankPool

# Enough for hypothesis to shrink a failing case.
STEPS = 50
STEPS_UNTIL_CHANGE = 5
BATCH = 4
LEARNING_RATE = 0.02
MOMENTUM = 0.5


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the settings it meets on the way."""

    seed: int
    width: int
    hidden: int
    tied: bool
    frozen: frozenset[int]
    dtypes: tuple[str, ...]
    micro_batches: int
    zero_every_steps: int
    set_to_none: bool
    as_view: bool
    settings: tuple[Setting, ...]
    smallest_part_bytes: int


class Net(torch.nn.Module):
    """Hidden layers of float32, then one layer of each of the other dtypes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.hidden = torch.nn.ModuleList(
            torch.nn.Linear(case.width, case.width) for _ in range(case.hidden)
        )
        if case.tied:
            self.hidden[-1].weight = self.hidden[0].weight
        for index in case.frozen:
            self.hidden[index % case.hidden].bias.requires_grad_(False)
        self.tails = torch.nn.ModuleList(
            torch.nn.Linear(case.width, case.width, dtype=getattr(torch, dtype))
            for dtype in case.dtypes
        )
        self.gain = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        values = inputs
        for layer in self.hidden:
            values = torch.tanh(layer(values)) + values
        for layer in self.tails:
            values = torch.tanh(layer(values.to(layer.weight.dtype)))
        return values.float() * self.gain


sizes_bytes = st.sampled_from([1, 100, 400, 1000, 1 << 20])
configurations = st.builds(
    Configuration,
    bucket_bytes=sizes_bytes,
    hierarchical=st.sampled_from(KNOBS["hierarchical"].kind.tried),
    # Sixteen take long to make, and are eight twice.
    channels=st.sampled_from(CHANNELS_VALUES[:-1]),
    first_bucket_bytes=st.just(0) | sizes_bytes,
    last_bucket_bytes=st.just(0) | sizes_bytes,
)
settings_met = st.builds(
    Setting,
    configuration=configurations,
    ends=st.none() | st.lists(st.booleans(), min_size=1, max_size=8).map(tuple),
)

cases = st.builds(
    Case,
    seed=st.integers(0, 10_000),
    width=st.integers(1, 9),
    hidden=st.integers(1, 4),
    tied=st.booleans(),
    frozen=st.frozensets(st.integers(0, 3), max_size=2),
    dtypes=st.lists(st.sampled_from(["float64", "bfloat16"]), unique=True).map(tuple),
    micro_batches=st.integers(1, 3),
    zero_every_steps=st.integers(1, 2),
    set_to_none=st.booleans(),
    as_view=st.booleans(),
    settings=st.lists(
        settings_met,
        min_size=STEPS // STEPS_UNTIL_CHANGE,
        max_size=STEPS // STEPS_UNTIL_CHANGE,
    ).map(tuple),
    # So that buckets of these small models travel in parts, too.
    smallest_part_bytes=st.sampled_from([16, 100, 2**19]),
)


def train_both(case: Case, rank_seeds: tuple[int, ...]) -> str | None:
    """Runs on each rank: 50 steps side by side; the first difference."""
    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", case.smallest_part_bytes):
        return _train_both(case, rank_seeds)


def _train_both(case: Case, rank_seeds: tuple[int, ...]) -> str | None:
    torch.manual_seed(case.seed)
    stock, ours = pair(Net(case), gradient_as_bucket_view=case.as_view)
    torch.manual_seed(rank_seeds[torch.distributed.get_rank()])
    wrapped = (stock, ours)
    summands = Summands(stock)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        for model in wrapped
    ]
    rate = LEARNING_RATE / (1 - MOMENTUM)
    found = None
    for step in range(STEPS):
        if step % STEPS_UNTIL_CHANGE == 0:
            configuration = case.settings[step // STEPS_UNTIL_CHANGE].of(ours)
            assert ours.reconfigure(configuration)
            assert ours.configuration == configuration
        if step % case.zero_every_steps == 0:
            summands.clear()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=case.set_to_none)
        for micro_batch in range(case.micro_batches):
            inputs = torch.randn(BATCH, case.width)
            for model in wrapped:
                last = micro_batch == case.micro_batches - 1
                with nullcontext() if last else model.no_sync():
                    model(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        # All ranks go on to the end: one that left would leave the others waiting.
        where = f"step {step}, {ours.configuration}"
        largest = summands.largest()
        found = found or difference(stock, ours, where, largest, rate)
        if case.dtypes:
            # The coarsest dtype's rounding would reach the weights of the finer ones.
            _restart_from(stock, ours, optimizers)
    return found


@torch.no_grad()
def _restart_from(
    stock: torch.nn.Module, ours: torch.nn.Module, optimizers: list[torch.optim.SGD]
) -> None:
    for expected, actual in zip(stock.parameters(), ours.parameters(), strict=True):
        actual.copy_(expected)
        if expected.grad is not None and actual.grad is not None:
            actual.grad.copy_(expected.grad)
        if expected in optimizers[0].state:
            momentum = optimizers[0].state[expected]["momentum_buffer"]
            optimizers[1].state[actual]["momentum_buffer"].copy_(momentum)


def check(pool: RankPool, case: Case) -> None:
    rank_seeds = tuple(case.seed + 1 + rank for rank in range(pool.world_size))
    assert pool.run(train_both, case, rank_seeds) == [None] * pool.world_size


@settings(max_examples=8)
@given(case=cases)
def test_two_ranks(two_ranks: RankPool, case: Case) -> None:
    check(two_ranks, case)


@settings(max_examples=3)
@given(case=cases)
@pytest.mark.slow
def test_four_ranks_on_two_nodes(four_ranks: RankPool, case: Case) -> None:
    check(four_ranks, case)


# Its gain comes close to zero, and with it the gain's gradient.
CLOSE_TO_ZERO = Case(
    seed=4553,
    width=8,
    hidden=3,
    tied=True,
    frozen=frozenset({1}),
    dtypes=(),
    micro_batches=2,
    zero_every_steps=1,
    set_to_none=False,
    as_view=False,
    settings=(
        Setting(Configuration(1, "leaders"), None),
        *[Setting(Configuration(1), None)] * (STEPS // STEPS_UNTIL_CHANGE - 1),
    ),
    smallest_part_bytes=16,
)


@example(case=CLOSE_TO_ZERO)
@settings(max_examples=2)
@given(case=cases)
@pytest.mark.slow
def test_three_ranks_on_two_unequal_nodes(three_ranks: RankPool, case: Case) -> None:
    check(three_ranks, case)
