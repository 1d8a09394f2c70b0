"""Gradients and weights are those of torch's DistributedDataParallel, whatever is configured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client import Configuration, DistributedDataParallel
from bagua_client.agent.job import describe_job
from bagua_client.environment import Environment
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.reducer import carrier
from bagua_client.reducer.offer import refusal_of
from bagua_client.torch_private.reducer import caps_of
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


WIDE = 16
STEPS_AFTER = 4
SMALL, LARGE = Configuration(WIDE * WIDE * 4), Configuration(3 * WIDE * WIDE * 4)
AS_IT_IS = None
"""The configuration in force: torch's reducer can stay, and gets our hook."""


def _train_changed(
    changes: list[Configuration | None], after: int, in_step: bool, compiled: bool
) -> bool:
    """Make the changes after so many steps, one right after the other: before the next step or,
    ``in_step``, between its forward and its backward pass. Return whether all gradients were
    stock's."""
    stock, ours = models = pair(nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(6))))
    if compiled:
        torch._dynamo.reset()
        for model in models:
            model.module.compile(backend="aot_eager")
    torch.manual_seed(dist.get_rank())
    same = True
    for step in range(after + STEPS_AFTER):
        inputs = torch.randn(3, WIDE)
        if step == after and not in_step:
            _change(ours, changes)
        losses = [model(inputs).square().mean() for model in models]
        if step == after and in_step:
            _change(ours, changes)
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        same &= all(map(_is_same, stock.parameters(), ours.parameters()))
    return same and tunable_of(ours).order_is_agreed and not tunable_of(ours).observers.has_failed


def _change(ours: nn.Module, changes: list[Configuration | None]) -> None:
    for configuration in changes:
        assert ours.reconfigure(configuration or ours.configuration)
        tunable_of(ours).attach()


def _is_same(expected: nn.Parameter, actual: nn.Parameter) -> bool:
    assert expected.grad is not None
    return actual.grad is not None and torch.equal(expected.grad, actual.grad)


@pytest.mark.parametrize(
    ("changes", "in_step", "after"),
    [
        ([AS_IT_IS], False, 0),
        ([AS_IT_IS], True, 1),
        ([SMALL, LARGE], True, 0),
        ([SMALL, LARGE], False, 1),
        ([SMALL, LARGE], True, 3),
        ([AS_IT_IS, SMALL], False, 1),
        ([AS_IT_IS, SMALL], True, 3),
    ],
)
def test_changes_without_a_step_between_them(
    two_ranks: RankPool, changes: list[Configuration | None], in_step: bool, after: int
) -> None:
    assert two_ranks.run(_train_changed, changes, after, in_step, False) == [True] * 2


def test_a_compiled_model_changed_after_its_first_step(two_ranks: RankPool) -> None:
    assert two_ranks.run(_train_changed, [AS_IT_IS], 1, False, True) == [True] * 2


class _Unusual(nn.Module):
    """A channels_last convolution, and parameters transposed, with gaps, empty and scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.gaps = nn.Parameter(torch.randn(5, 6)[:, ::2])
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        values = self.convolution(images).mean(dim=(2, 3)) @ self.transposed @ self.gaps
        return values * self.scalar * self.one.sum() + self.empty.sum()


def _train_unusual(hierarchical: str, set_to_none: bool) -> str | None:
    models = pair(_Unusual())
    _, ours = models
    torch.manual_seed(dist.get_rank())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    found = None
    for step, bucket_bytes in enumerate([1, 60, 1 << 20, 1, 1 << 20]):
        assert ours.reconfigure(Configuration(bucket_bytes, hierarchical))
        images = torch.randn(2, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(images).square().sum().backward()
        found = found or difference(*models, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
    weight = ours.module.convolution.weight
    if not weight.grad.is_contiguous(memory_format=torch.channels_last):
        return "the gradient has other strides than its parameter"
    return found


@pytest.mark.parametrize(
    ("hierarchical", "set_to_none"), [("off", True), ("leaders", False), ("shards", True)]
)
def test_unusual_parameters_are_reduced_as_in_torch(
    four_ranks: RankPool, hierarchical: str, set_to_none: bool
) -> None:
    assert four_ranks.run(_train_unusual, hierarchical, set_to_none) == [None] * 4


def _frozen_before_tune(thaws_at: int) -> tuple[str | None, str]:
    """What differs from torch's wrapper, where a layer was frozen after that was made; and why it
    is not tuned."""
    models = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        wrapped: Any = Stock(
            nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))), find_unused_parameters=True
        )
        wrapped.module[0].requires_grad_(False)
        models.append(bagua_client.tune(wrapped) if is_ours else wrapped)
    found = None
    for step in range(6):
        if step == thaws_at:
            for model in models:
                model.module[0].requires_grad_(True)
        if step == 2:
            assert models[1].reconfigure(Configuration(100))
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 6)
        for model in models:
            model.zero_grad()
            model(inputs).square().sum().backward()
        found = found or difference(*models, f"step {step}")
    return found, refusal_of(models[1], caps_of(models[1]))


@pytest.mark.parametrize("thaws_at", [1, 4])
def test_what_is_frozen_before_tune_is_reduced_once_it_is_trained(
    two_ranks: RankPool, thaws_at: int
) -> None:
    """Torch's reducer has it: it was trained when that was made."""
    assert two_ranks.run(_frozen_before_tune, thaws_at) == [(None, "")] * 2


def _thawed_before_tune() -> str:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2)))
    model[0].requires_grad_(False)
    wrapped: Any = Stock(model)
    model[0].requires_grad_(True)
    model[1].weight.requires_grad_(False)
    tuned = bagua_client.tune(wrapped)
    return refusal_of(tuned, caps_of(tuned))


def test_a_wrapper_that_others_are_trained_of_than_it_knows_is_not_tuned(
    two_ranks: RankPool,
) -> None:
    for refusal in two_ranks.run(_thawed_before_tune):
        assert refusal.startswith("other parameters are trained now")


# Buckets that travel in parts, and in 16 bits.


WIDTH = 48
PART_BYTES = 1024
"""Of a bucket of 9 KiB and another of 192 B, with whatever padding."""
WAYS = [Configuration(1, hierarchical) for hierarchical in ("off", "leaders", "shards")]
# Of a number of 8 bits (bfloat16), and of 11 (float16): a sum of four is rounded four times, and
# once before.
ROUNDING = {"bf16": 5 * 2**-8, "fp16": 5 * 2**-11}


def _gradients(configuration: Configuration, scale: float) -> list[torch.Tensor]:
    """Of a layer whose gradient on this rank is known, after a step under ``configuration``."""
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    assert model.reconfigure(configuration)
    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", PART_BYTES):
        for _ in range(2):
            model.zero_grad()
            (model(_inputs(dist.get_rank())) * scale).sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def _inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    ("way", "precision", "channels"),
    [(WAYS[0], "bf16", 1), (WAYS[0], "fp16", 8), (WAYS[1], "fp16", 1), (WAYS[2], "bf16", 8)],
    ids=str,
)
def test_gradients_travel_in_16_bits(
    four_ranks: RankPool, way: Configuration, precision: str, channels: int
) -> None:
    told = replace(way, wire_precision=precision, channels=channels)
    # Sums that float16 could not hold, of numbers that it can.
    found = four_ranks.run(_gradients, told, 10_000.0)
    ranks = [_inputs(rank).sum(0) * 10_000.0 for rank in range(4)]
    expected = torch.stack(ranks).mean(0).expand(WIDTH, WIDTH)
    summands = torch.stack(ranks).abs().mean(0)
    for weight, bias in found:
        assert weight.dtype == bias.dtype == torch.float32
        assert torch.equal(weight, found[0][0])
        assert torch.equal(bias, found[0][1])
        assert ((weight - expected).abs() <= ROUNDING[precision] * summands).all()
        assert not torch.equal(weight, expected)
        assert bias.tolist() == pytest.approx([30_000.0] * WIDTH, rel=ROUNDING[precision])


def _parts(configuration: Configuration) -> tuple[list[tuple[int, int]], list[float]]:
    """Channel and number of elements of what travels in one step, and the gradients' sums."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    )
    assert model.reconfigure(configuration)
    sent: list[tuple[int, int]] = []
    carry = carrier.Carrier._pipeline

    def pipeline(travel: carrier.Carrier, device: torch.device, channel: int) -> object:
        found = carry(travel, device, channel)
        start = found.start

        def started(flat: torch.Tensor, *others: object) -> object:
            sent.append((channel, flat.numel()))
            return start(flat, *others)  # type: ignore[arg-type]

        return mock.Mock(wraps=found, start=started)

    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", PART_BYTES):
        model(_inputs(dist.get_rank())).sum().backward()
        model.zero_grad()
        with mock.patch.object(carrier.Carrier, "_pipeline", pipeline):
            model(_inputs(dist.get_rank())).sum().backward()
    return sent, [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]


def test_a_bucket_travels_in_parts_dealt_over_the_channels(two_ranks: RankPool) -> None:
    """Also one of a single tensor; a small bucket goes whole on the channel that is next."""
    (sent, sums), (others_sent, others_sums) = two_ranks.run(_parts, Configuration(1, channels=4))
    _, expected = two_ranks.run(_parts, Configuration(1))[0]
    assert sent == others_sent
    # Three times a bias, and a weight.
    assert sorted(size for _, size in sent) == [48] * 3 + [576] * 12
    turns = [channel for channel, _ in sent]
    assert turns == [turn % 4 for turn in range(len(sent))]
    assert sums == others_sums == pytest.approx(expected, rel=1e-4)


def _offered(dtype: torch.dtype, has_hook: bool) -> list[str]:
    """Precisions, where bfloat16 is allowed."""
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, dtype=dtype))
    if has_hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert model.reconfigure(model.configuration)
    asked = Environment(allowed=frozenset({"bf16"}))
    assert "wire_precision" not in describe_job(tunable_of(model), Environment(), "job")["knobs"]
    offered = describe_job(tunable_of(model), asked, "job")["knobs"].get("wire_precision", {})
    return list(offered.get("values", []))


@pytest.mark.parametrize(
    ("dtype", "has_hook", "offered"),
    [
        (torch.float32, False, ["as_is", "bf16"]),
        (torch.bfloat16, False, []),
        (torch.float32, True, []),
    ],
)
def test_another_precision_is_offered_where_it_is_allowed_and_makes_a_difference(
    two_ranks: RankPool, dtype: torch.dtype, has_hook: bool, offered: list[str]
) -> None:
    assert two_ranks.run(_offered, dtype, has_hook) == [offered] * 2
