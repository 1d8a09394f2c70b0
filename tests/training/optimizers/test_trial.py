"""What cannot be fused is left plain, with a sentence that says why."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

from bagua_training.optimizers import fuse_optimizer
from bagua_training.optimizers.trial import difference, step_plainly
from tests.training.optimizers import strangers
from tests.training.optimizers.strangers import Ahead, LoopAdam, LoopLamb, Named, Noisy
from tests.training.optimizers.twins import Twins

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (LoopLamb, "in step 1 the fused result would differ from the plain one"),
        (torch.optim.Adafactor, "in step 1 its state row_var is neither a number nor of the shape"),
        (Named, "in step 1 a step of copies of its parameters raised KeyError"),
        (strangers.LaggedLars, "in step 1 the fused state norm would differ from the plain one"),
        (strangers.AggMo, "in step 1 its state momenta is neither a number nor of the shape"),
    ],
)
def test_it_says_why_and_steps_as_ever(
    made: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the user claims to know better."""
    twins = Twins(made, element_wise=True)
    with caplog.at_level(logging.WARNING):
        twins.steps(3)
    (record,) = caplog.records
    assert record.message.startswith(f"{made.__name__} is not fused: {reason}")
    assert twins.fused_count == 0
    assert getattr(twins.fused, "calls", 3) == 3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_what_depends_on_shapes_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    matrices = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    twins = Twins(torch.optim.Muon, matrices, element_wise=True)  # type: ignore[attr-defined]
    twins.steps(1)
    assert twins.fused_count == 0
    assert caplog.records[0].message.startswith("Muon is not fused: in step 1")


def test_a_refusal_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Its trial raises half-way, after it has changed all that an optimizer can."""
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
    optimizer = fuse_optimizer(strangers.HalfWay(model.parameters()), element_wise=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    weights = [parameter.clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        # Only what the trial does is looked at.
        patch.setattr("bagua_training.optimizers.fused.step_plainly", lambda *_: None)
        optimizer.fuse_step()  # type: ignore[attr-defined]
    assert "a step of copies of its parameters raised RuntimeError: too long" in caplog.text
    assert all(map(torch.equal, weights, model.parameters()))
    assert all(bool((p.grad == 1).all()) for p in model.parameters())  # type: ignore[union-attr]
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.seen == 0
    assert torch.equal(random, torch.get_rng_state())
    # Each weight has memory of its own again.
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_what_raises_in_the_middle_of_a_fused_step_leaves_states_that_go_on() -> None:
    twins = Twins(LoopAdam)
    twins.steps(3)
    twins.backward()
    update = LoopAdam.update
    with pytest.MonkeyPatch.context() as patch:

        def failing(self: Any, p: Any, *rest: Any) -> None:
            update(self, p, *rest)
            raise KeyboardInterrupt

        patch.setattr(LoopAdam, "update", failing)
        with pytest.raises(KeyboardInterrupt):
            twins.fused.fuse_step()
    # The first group was stepped and the second was not, in their states and their weights.
    steps = [[twins.fused.state[p]["step"] for p in g["params"]] for g in twins.fused.param_groups]
    assert steps == [[4, 4, 4], [3, 3, 3]]
    twins.fused.load_state_dict(copy.deepcopy(twins.plain.state_dict()))
    for ours, theirs in zip(*twins.parameters(), strict=True):
        ours.data.copy_(theirs.data)
    twins.steps(2)


def test_random_numbers_are_those_of_the_plain_optimizer() -> None:
    """Of which the trial must take none."""
    twins = Twins(Noisy, element_wise=True)
    for _ in range(3):
        twins.backward()
        for step in (twins.fused.fuse_step, twins.plain.step):
            torch.manual_seed(5)
            step()
        twins.check()


def _closures(twins: Twins) -> list[Any]:
    """Both models' losses, which count how often they are computed."""
    found = []
    for model, optimizer in ((twins.fused_model, twins.fused), (twins.plain_model, twins.plain)):

        def closure(model: Any = model, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 7)).square().sum()
            loss.backward()
            return loss

        found.append(closure)
    return found


def test_a_step_that_calls_the_closure_in_its_middle_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twins = Twins(Ahead, replace_step=True, element_wise=True)
    ours, theirs = _closures(twins)
    for closure in (ours, theirs):
        closure()
    for _ in range(3):
        loss = twins.fused.step(ours)
        assert loss == twins.plain.step(theirs)
        twins.check()
    assert "calls the closure in the middle of its step" in caplog.text


@pytest.mark.parametrize("made", [LoopAdam, LoopLamb])
def test_a_closure_is_called_once(made: Any) -> None:
    twins = Twins(made, replace_step=True, element_wise=True)
    ours, theirs = _closures(twins)
    calls: list[int] = []
    for _ in range(3):
        loss = twins.fused.step(lambda: (calls.append(1), ours())[1])
        assert loss == twins.plain.step(theirs)
        twins.check()
    assert len(calls) == 3


def test_a_wrapper_of_another_optimizer_is_an_error() -> None:
    class Wrapper(LoopAdam):
        pass

    inner = LoopAdam(nn.Linear(2, 1).parameters())
    outer = Wrapper(inner.param_groups)
    outer.inner = inner  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="Wrapper wraps another optimizer: fuse that one"):
        fuse_optimizer(outer)


def test_it_is_tried_in_the_first_step_that_would_be_fused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twins = Twins(LoopLamb, element_wise=True)
    for number in range(4):
        # At first, only one parameter of each group has a gradient.
        twins.steps(1, unused=(2, 3, 4, 5) if number < 3 else ())
    assert "in step 1 the fused" in caplog.text


def test_copies_are_of_the_parameters_that_are_tried_alone() -> None:
    """Each state is a part of a long one, of which a deep copy would be a copy of all."""
    twins = Twins(LoopAdam)
    twins.steps(3)
    seen: list[int] = []

    def step(twin: Any, closure: Any) -> None:
        for state in twin.state.values():
            seen.append(state["mean"].untyped_storage().nbytes() - state["mean"].nbytes)
        step_plainly(twin, closure)

    twins.backward()
    chosen = [group["params"] for group in twins.fused.param_groups]
    assert difference(twins.fused, chosen, step, None) == ""
    assert len(seen) == 6
    assert not any(seen)
