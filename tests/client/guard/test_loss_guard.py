"""Which losses are harm, and which are chance."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch

from bagua_client.guard.loss_guard import Losses, LossGuard


def told(values: list[float]) -> Losses:
    guard = LossGuard()
    for value in values:
        guard.tell(value)
    return guard.take()


def noisy(mean: float, count: int, seed: int, spread: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, spread * mean) for _ in range(count)]


def after_usual(values: list[float]) -> LossGuard:
    guard = LossGuard()
    guard.begin(None)
    assert guard.judge([told(values)]) == ""
    guard.begin("bf16")
    return guard


def test_a_loss_far_above_that_of_before_is_harm() -> None:
    guard = after_usual(noisy(1.0, 40, 0))
    assert guard.judge([told(noisy(1.3, 4, 1))]) == ""  # too few to say
    words = guard.judge([told(noisy(1.3, 20, 2))])
    assert re.match(r"the loss is 1\.[23]\d*; it was (1\.0|0\.9)", words)


def test_chance_and_a_little_more_is_no_harm() -> None:
    for seed in range(50):
        guard = after_usual(noisy(1.0, 40, 2 * seed))
        assert guard.judge([told(noisy(1.02, 20, 2 * seed + 1))]) == ""
        assert guard.judge([told(noisy(0.5, 20, 2 * seed + 1))]) == ""


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_loss_that_is_not_finite_is_harm(bad: float) -> None:
    guard = after_usual(noisy(1.0, 40, 0))
    assert "not finite" in guard.judge([told([1.0, bad])])


def test_what_the_default_does_is_no_harm() -> None:
    guard = after_usual(noisy(1.0, 40, 0))
    guard.begin(None)
    assert guard.judge([told([math.nan, *noisy(9.0, 30, 0)])]) == ""
    # And with a usual loss that is not finite nothing can be compared.
    guard.begin("bf16")
    assert guard.judge([told(noisy(9.0, 30, 0))]) == ""


def test_short_trials_are_judged_together_by_how_they_change_the_numbers() -> None:
    guard = after_usual(noisy(1.0, 40, 0))
    words = []
    for seed in range(4):
        for change, loss in (("bf16", 1.0), ("quantized", 1.4), (None, 1.0)):
            guard.begin(change)
            words.append(guard.judge([told(noisy(loss, 3, 10 + seed))]))
    assert [place for place, each in enumerate(words) if each] == [7, 10]  # the third of the worse


@pytest.mark.parametrize("shuffled", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_fast_is_no_harm_in_whatever_order_trials_come(
    seed: int, shuffled: float
) -> None:
    generator, guard, steps = random.Random(seed), LossGuard(), 0
    guard.begin(None)
    for trial in range(120):
        if trial > 3 and generator.random() < shuffled:  # else one like the one before follows
            guard.begin(generator.choice([None, None, "bf16", "quantized"]))
        for _ in range(2):
            steps += 3
            losses = noisy(0.99**steps, 3, 1000 * seed + steps, spread=0.02)
            assert guard.judge([told(losses)] * 2) == ""


def test_a_new_round_judges_by_its_own_losses() -> None:
    guard = after_usual(noisy(1.0, 40, 0))
    for seed in range(4):
        assert guard.judge([told(noisy(1.0, 12, seed))]) == ""
    guard.begin("bf16", is_kept=True)
    guard.judge([told(noisy(0.5, 20, 5))])
    guard.begin(None)
    for seed in range(4):
        guard.judge([told(noisy(0.5, 40, seed))])
    guard.begin("bf16")
    assert guard.judge([told(noisy(0.5, 3, 9))]) == ""


def test_each_loss_is_taken_once_and_none_while_configurations_change() -> None:
    guard = LossGuard()
    assert not guard.has_any
    guard.tell(torch.tensor([1.0, 3.0], requires_grad=True))
    guard.tell(4)
    assert guard.has_any
    assert guard.take() == Losses(2, 6.0, 20.0)
    assert guard.take() == Losses()
    guard.pause()
    guard.tell(1.0)
    assert guard.take() == Losses()
    guard.begin("bf16")
    guard.tell(2.0)
    assert guard.take() == Losses(1, 2.0, 4.0)


def test_a_winner_is_watched_for_what_lasts() -> None:
    """One loss that is not finite gives up a trial, and not what was kept."""
    guard = after_usual(noisy(1.0, 400, 0))
    guard.begin("bf16", is_kept=True)
    both = [told([math.inf, *noisy(1.0, 23, 1)]), told(noisy(1.0, 24, 2))]
    assert guard.judge(both) == ""
    words = [guard.judge([told(noisy(1.5, 24, seed))] * 2) for seed in range(30)]
    assert words[0] == ""
    assert any("does not turn back" in each for each in words)


def test_what_does_not_change_the_numbers_is_usual_when_it_is_kept() -> None:
    guard = after_usual(noisy(1.0, 400, 0))
    guard.begin(None, is_kept=True)
    assert {guard.judge([told(noisy(9.0, 24, seed))]) for seed in range(60)} == {""}


def test_a_loss_is_a_number() -> None:
    with pytest.raises(TypeError, match="not str"):
        LossGuard().tell("0.3")  # type: ignore[arg-type]
