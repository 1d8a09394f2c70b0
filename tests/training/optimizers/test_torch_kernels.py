"""Where torch has kernels over many tensors, they are used."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, RMSprop

from bagua_training.optimizers import fuse_optimizer
from tests.training.optimizers.twins import Twins

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("made", [Adam, SGD])
def test_replacing_the_step_turns_on_torchs_fused(
    made: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        twins = Twins(lambda groups: made(groups, lr=0.1), replace_step=True)
    assert [group["fused"] for group in twins.fused.param_groups] == [True, True]
    assert caplog.messages == [
        f"{made.__name__} steps with torch's own fused kernels, which are faster"
    ]
    for _ in range(3):
        twins.backward()
        twins.fused.step()
        twins.plain.step()
        for ours, theirs in zip(*twins.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert twins.fused_count == 0


@pytest.mark.parametrize(
    ("made", "is_ours"),
    [
        (Adam, True),  # fuse_step fuses by default, as Bagua's does
        (lambda groups: Adam(groups, fused=True), False),
        (lambda groups: Adam(groups, fused=False), True),
        (lambda groups: Adam(groups, foreach=True), True),  # a loop, on CPUs
    ],
)
def test_fuse_step_leaves_what_was_chosen(made: Any, is_ours: bool) -> None:
    twins = Twins(made)
    before = copy.deepcopy(twins.fused.state_dict()["param_groups"])
    twins.steps(3)
    assert twins.fused_count == (6 if is_ours else 0)
    assert twins.fused.state_dict()["param_groups"] == before


@pytest.mark.parametrize(
    "made",
    [
        RMSprop,
        lambda groups: Adam(groups, fused=False),
        lambda groups: SGD(groups, 0.1, differentiable=False, foreach=False),
    ],
)
def test_where_torch_has_none_the_replaced_step_is_ours(made: Any) -> None:
    twins = Twins(made, replace_step=True)
    for _ in range(3):
        twins.backward()
        twins.fused.step()
        twins.plain.step()
        twins.check()
    assert twins.fused_count == 6


def test_states_from_before_and_from_elsewhere_go_on_fused() -> None:
    """They say that nobody has chosen, and have their counts where plain steps want them."""
    twins = Twins(Adam)
    twins.steps(3)
    plain, model = copy.deepcopy((twins.plain, twins.plain_model))
    again = fuse_optimizer(plain, replace_step=True)
    again.load_state_dict(twins.fused.state_dict())
    assert [group["fused"] for group in again.param_groups] == [True, True]
    generator = torch.Generator().manual_seed(7)
    for ours, theirs in zip(model.parameters(), twins.plain_model.parameters(), strict=True):
        ours.grad = torch.randn(ours.shape, generator=generator)
        theirs.grad = ours.grad.clone()
    again.step()
    twins.plain.step()
    for ours, theirs in zip(model.parameters(), twins.plain_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert {float(state["step"]) for state in again.state.values()} == {4.0}


def test_a_sparse_gradient_turns_it_off_where_torch_could_not_step() -> None:
    model = nn.ModuleList([nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)])
    plain = copy.deepcopy(model)
    for each, is_ours in ((model, True), (plain, False)):
        optimizer = SGD(each.parameters(), lr=0.1)
        if is_ours:
            fuse_optimizer(optimizer, replace_step=True)
            assert optimizer.param_groups[0]["fused"]
        each[1](each[0](torch.tensor([1, 5]))).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_scaler_unscales_for_it() -> None:
    twins = Twins(Adam, replace_step=True)
    twins.backward()
    for parameter in twins.parameters()[0]:
        parameter.grad *= 8
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.tensor(1.0))
    scaler.step(twins.fused)
    twins.plain.step()
    for ours, theirs in zip(*twins.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
