"""What is read in the code of an optimizer, and what is refused for it."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

from bagua_training.optimizers.reading import ELEMENT_WISE, read
from tests.training.optimizers import strangers
from tests.training.optimizers.twins import Twins

pytestmark = pytest.mark.slow


def made(optimizer: Any) -> Any:
    return optimizer(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).parameters())


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (strangers.LaggedLars, r"it calls \.norm of a tensor, in line \d+ of strangers.py"),
        (strangers.AggMo, r"for beta in group\['betas'\]}` cannot be read"),
        (strangers.HalfWay, "changes seen once for each parameter|rand_like"),
        (strangers.Counting, "it computes with the place of a parameter"),
        (strangers.Carrying, "scale may be of another parameter"),
        (strangers.Sharing, "it changes count once for each parameter"),
        (strangers.Sliced, "it takes a part of a tensor"),
        (strangers.OwnInit, "it has a _init_group of its own in place of torch's"),
        (strangers.Noisy, "it calls rand_like with a tensor"),
        (strangers.Named, "it keeps dict in scales"),
        (strangers.Ahead, "it calls the closure in the middle of its step"),
        (torch.optim.Adafactor, "it calls"),
    ],
)
def test_what_is_not_element_wise_is_found(optimizer: Any, reason: str) -> None:
    found = read(made(optimizer)).reason
    assert found
    assert re.search(reason, found), found


@pytest.mark.parametrize(
    "optimizer",
    [
        strangers.Stranger,
        strangers.Lion,
        strangers.Data,
        strangers.Functional,
        strangers.Slower,
        strangers.LoopAdam,
        strangers.Replacing,
    ],
)
def test_what_is_element_wise_is_fused_and_right(optimizer: Any) -> None:
    twins = Twins(optimizer)
    for number in range(12):
        twins.backward()
        # Both ways in turns, as Bagua's own test has it.
        (twins.fused.fuse_step if number % 3 else twins.fused.step)()
        twins.plain.step()
        twins.check()
        # Some add to their gradients.
        for ours, theirs in zip(*twins.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert twins.fused_count == 2 * 8


@pytest.mark.parametrize("optimizer", ELEMENT_WISE)
def test_torchs_own_are_fused_and_right(optimizer: Any) -> None:
    twins = Twins(optimizer)
    twins.steps(12)
    assert twins.fused_count == 24


def test_a_switch_that_is_turned_on_later_is_seen_in_the_same_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twins = Twins(strangers.Switched)
    twins.steps(3)
    assert twins.fused_count == 6
    for optimizer in (twins.fused, twins.plain):
        optimizer.param_groups[1]["is_layer_wise"] = True
    with caplog.at_level(logging.WARNING):
        twins.steps(3)
    (record,) = caplog.records
    assert "is not fused: its code is not seen to treat each element by itself" in record.message
    assert twins.fused_count == 6


def test_a_state_that_the_code_does_not_make_is_not_stepped_as_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It may have been loaded from a step with other switches."""
    twins = Twins(strangers.LoopAdam)
    twins.steps(2)
    for optimizer in (twins.fused, twins.plain):
        state = optimizer.state_dict()
        for each in state["state"].values():
            each["extra"] = 1.0
        optimizer.load_state_dict(state)
    twins.steps(2)
    assert "the state extra, which its step does not make" in caplog.text


def test_code_that_is_not_to_be_had_is_refused() -> None:
    space: dict[str, Any] = {}
    exec(
        "import torch\n"
        "class Hidden(torch.optim.Optimizer):\n"
        "    def __init__(self, params): super().__init__(params, {})\n"
        "    def step(self, closure=None): pass\n",
        space,
    )
    assert "the source of its step is not to be had" in read(made(space["Hidden"])).reason
