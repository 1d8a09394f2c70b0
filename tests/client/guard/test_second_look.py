"""What of a loss that is watched for as long as a training runs is harm, and what is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from bagua_client.guard.loss_guard import Losses, SecondLook

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
