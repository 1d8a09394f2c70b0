"""Which losses are harm, and which are chance: in a trial, and for as long as a training runs."""

from __future__ import annotations

import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bagua_client
from bagua_client import DistributedDataParallel
from bagua_client.guard import Losses, LossGuard, SecondLook
from bagua_client.reporter.lasting_change import DriftWatch
from tests.client.agent.scripted_service import ScriptedService
from tests.client.sharded.models import MERGES
from tests.ranks import RankPool


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


Curve = Callable[[float], float]

TUNED_STEPS = 400
"""Half of them under the default, in turns of a dozen."""
REPORT_STEPS, RANKS = 24, 2
NOISES = (0.02, 0.1, 0.3)
"""The standard deviation of one loss, in parts of it."""
LONG = 40_000


def report(mean: float, steps: int, noise: float, generator: random.Random) -> Losses:
    count = steps * RANKS
    mean += noise * abs(mean) * generator.gauss(0, 1) / math.sqrt(count)
    return Losses(count, count * mean, count * mean**2 * (1 + noise**2))


def tuned(curve: Curve, noise: float, generator: random.Random) -> SecondLook:
    look = SecondLook()
    for step in range(0, TUNED_STEPS, 24):
        for begin in (step, step + 6):
            look.learn(report(curve(begin), 6, noise, generator), 6)
    look.begin()
    return look


def harm(curve: Curve, noise: float = 0.1, seed: int = 0, steps: int = LONG) -> tuple[int, str]:
    """After how many steps, and in which words; the loss follows the curve. No words: never."""
    generator = random.Random(seed)
    look = tuned(curve, noise, generator)
    for step in range(TUNED_STEPS, steps, REPORT_STEPS):
        losses = report(curve(step), REPORT_STEPS, noise, generator)
        if words := look.judge(losses, REPORT_STEPS):
            return step, words
    return steps, ""


def falling(step: float, floor: float = 0.5) -> float:
    return floor + 2 * math.exp(-step / 300)


HEALTHY: dict[str, Curve] = {
    "falls to a floor": falling,
    "falls to nothing, and wanders there": lambda t: falling(t, 1e-3 * (1 + 0.8 * math.sin(t))),
    "power law": lambda t: 1.5 + 8 * (t + 20) ** -0.4,
    "S-shaped, in the tuning": lambda t: 1 + 0.65 * (1 - math.tanh((t - 250) / 120)),
    "S-shaped, later": lambda t: 1 + 0.65 * (1 - math.tanh((t - 900) / 300)),
    "through zero": lambda t: 2 - math.log(1 + t / 50),
    "resumed: flat": lambda t: 1.7,
    "stops falling": lambda t: falling(min(t, TUNED_STEPS)),
    "periodic, shorter than the tuning": lambda t: 1 + 0.1 * math.sin(2 * math.pi * t / 300),
    "periodic, within the margin": lambda t: 1 + 0.02 * math.sin(2 * math.pi * t / 3000),
    "epochs in steps": lambda t: falling(t) * 0.93 ** (t // 2000) * (1 + 2e-5 * (t % 2000)),
    "a new rate, made up for": lambda t: (
        falling(t) + (0.15 * math.exp(-(t - 20_000) / 500) if t > 20_000 else 0)
    ),
}

HARMED: dict[str, tuple[Curve, float]] = {
    # With the loss by which it must be seen.
    "drifts up from the beginning": (lambda t: falling(t) + 2e-5 * max(0, t - 400), 0.85),
    "drifts up ever faster": (lambda t: falling(t) + 1e-9 * max(0, t - 400) ** 2, 0.85),
    "drifts up after long": (lambda t: falling(t) + 1e-4 * max(0, t - 25_000), 0.95),
    "rises only by a third": (lambda t: falling(t) + 0.2 * (t > 20_000), 0.71),
    "rises below where it began": (lambda t: falling(t) + 0.5 * min(1, max(0, t - 5000) / 9000), 1),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loss_is_no_harm(name: str) -> None:
    found = [harm(HEALTHY[name], noise, seed) for noise in NOISES for seed in range(8)]
    assert [words for _, words in found if words] == []


@pytest.mark.parametrize("name", HARMED)
def test_a_loss_that_turns_back_lastingly_is_harm(name: str) -> None:
    curve, by = HARMED[name]
    for noise in NOISES:
        for seed in range(5):
            step, words = harm(curve, noise, seed)
            assert words, noise
            assert curve(step) <= by, (noise, step)


def test_a_long_cycle_of_the_data_is_taken_for_harm() -> None:
    """What it cannot tell from a divergence, as the module says."""
    assert harm(lambda t: 1 + 0.2 * math.sin(2 * math.pi * t / 20_000))[1]


def test_a_divergence_is_seen_soon_and_told_in_numbers() -> None:
    step, words = harm(lambda t: falling(t) + (t > 1000), noise=0.02)
    assert step < 1000 + 300
    assert words.startswith("the loss is 1.5")
    assert "was to be expected, as a training by default does not turn back" in words


def test_spikes_are_no_harm() -> None:
    generator = random.Random(1)
    look = tuned(falling, 0.05, generator)
    for number in range(1000):
        curve = falling(TUNED_STEPS + REPORT_STEPS * number)
        spike = 1e6 if number % 10 == 5 else curve
        assert look.judge(report(spike, REPORT_STEPS, 0.05, generator), REPORT_STEPS) == ""


def test_a_loss_that_is_not_finite_for_long_is_harm_and_for_a_step_is_not() -> None:
    generator = random.Random(2)
    look = tuned(falling, 0.05, generator)
    few, all_of_them = Losses(47, 47.0, 48.0, 1), Losses(lost=48)
    good = report(0.6, REPORT_STEPS, 0.05, generator)
    for _ in range(100):
        assert look.judge(few._replace(total=47 * 0.6), REPORT_STEPS) == ""
    for _ in range(3):
        assert [look.judge(each, REPORT_STEPS) for each in (all_of_them, good)] == ["", ""]
    words = [look.judge(all_of_them, REPORT_STEPS) for _ in range(4)]
    assert words[:3] == [""] * 3
    assert words[3].startswith("the loss is not finite any more; it was 0.59")


def test_where_it_is_kept_again_the_lowest_level_is_still_known() -> None:
    """A harm that goes on through another tuning is not forgiven: that one began in the middle."""
    generator = random.Random(3)
    look = tuned(falling, 0.02, generator)
    for _ in range(50):
        assert look.judge(report(0.55, REPORT_STEPS, 0.02, generator), REPORT_STEPS) == ""
    for _ in range(20):
        look.learn(report(0.9, 12, 0.02, generator), 12)
    look.begin()
    assert any(look.judge(report(0.9, REPORT_STEPS, 0.02, generator), 24) for _ in range(40))


@pytest.mark.parametrize("default_steps", [0, 6, 40])
def test_where_the_default_was_hardly_seen_what_was_kept_says_what_is_usual(
    default_steps: int,
) -> None:
    """A job that begins with what an earlier one had found measures the default in few steps."""
    generator = random.Random(4)
    look = SecondLook()
    if default_steps:
        look.learn(report(1.0, default_steps, 0.05, generator), default_steps)
    look.begin()
    for _ in range(200):
        assert look.judge(report(1.0, REPORT_STEPS, 0.05, generator), REPORT_STEPS) == ""
    assert any(look.judge(report(1.3, REPORT_STEPS, 0.05, generator), 24) for _ in range(60))


# Real ranks give up what was kept once the loss turns back, all in the same step.

KEPT = {"bucket_bytes": 2**20, "wire_precision": "bf16"}
TRIED = [{"bucket_bytes": 2**21}, KEPT]
MOST_STEPS = 3000
STEPS_AFTER = 800


def _model(is_sharded: bool) -> Any:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    if not is_sharded:
        return DistributedDataParallel(net)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    return bagua_client.tune(net)


def _trained(
    url: str, by_hand: bool = False, is_sharded: bool = False
) -> tuple[list[str], list[str]]:
    """The precision in force in each step after the tuning, and how its rounds ended. On rank 1
    the loss rises then.

    Args:
        by_hand: the training sets the same precision itself, after the tuning.
    """
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url, "BAGUA_AUTOTUNE_ALLOW": "bf16"}
    with mock.patch.dict(os.environ, variables):
        model = _model(is_sharded)
        model(torch.ones(2, 16)).square().mean().backward()  # Its tuning may begin only here.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen: list[str] = []
    summaries: list[str] = []
    for step in range(MOST_STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()
        optimizer.step()
        rise = 1e-3 * len(seen) if dist.get_rank() == 1 else 0.0
        model.report_loss(1.0 + 0.01 * (step % 3) + rise)
        if model.is_tuning:
            continue
        seen.append(model.configuration.wire_precision)
        if by_hand and len(seen) == 50:
            assert model.reconfigure(replace(model.configuration, bucket_bytes=2**22))
        if model.tuning.summary not in summaries:
            summaries.append(model.tuning.summary)
        if len(seen) == STEPS_AFTER:
            break
    return seen, summaries


@pytest.mark.parametrize(
    "is_sharded", [False, pytest.param(True, marks=[pytest.mark.slow, MERGES])]
)
def test_all_ranks_return_to_the_default_in_the_same_step(
    two_ranks: RankPool, is_sharded: bool
) -> None:
    with ScriptedService([TRIED], steps=30) as service:
        (first, _), (second, _) = two_ranks.run(_trained, service.url, False, is_sharded)
        (event,) = service.bodies("diverged")
        assert service.bodies("disagreement") == []
    assert first == second
    back = first.index("as_is", first.index("bf16"))
    assert set(first[back:]) == {"as_is"}
    assert event["trial"] is None
    assert "was to be expected, as a training by default does not turn back" in event["message"]


def _without_reporter(url: str) -> list[str]:
    """The same, where the thread that talks to the service fails after the tuning."""
    with mock.patch.object(DriftWatch, "add", side_effect=RuntimeError("on purpose")):
        return _trained(url)[0]


@pytest.mark.slow
def test_the_guard_needs_no_service(two_ranks: RankPool) -> None:
    with ScriptedService([TRIED], steps=30) as service:
        first, second = two_ranks.run(_without_reporter, service.url)
        assert service.bodies("diverged") == []
    assert first == second
    back = first.index("as_is", first.index("bf16"))
    assert set(first[back:]) == {"as_is"}


@pytest.mark.slow
def test_what_the_training_sets_by_hand_is_not_judged(two_ranks: RankPool) -> None:
    with ScriptedService([TRIED], steps=30) as service:
        (first, _), (second, _) = two_ranks.run(_trained, service.url, True)
        assert service.bodies("diverged") == []
    assert first == second
    assert first[-1] == "bf16"
