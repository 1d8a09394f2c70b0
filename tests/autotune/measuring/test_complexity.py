"""Batches that differ: what is told of their complexity makes intervals narrow, or does nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from functools import cache
from statistics import fmean, median

import pytest

from bagua_autotune.measuring.complexity import LEARNING_STEPS, Correction, Step, learn
from bagua_autotune.model.job import Event, Observation
from bagua_autotune.model.statistics import Estimate, estimate
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.lists import every_trial
from bagua_wire.configuration import Value
from tests.autotune.support import make_spec, peaked, present

NOISE = 0.01
Hint = Callable[[random.Random, float], float | None]


def steps_of(
    count: int, seed: int = 0, fixed: float = 0.05, each: float = 0.001, noise: float = NOISE
) -> list[Step]:
    """Steps that compute a millisecond for each of 20 to 200 tokens, and communicate."""
    rng = random.Random(seed)
    tokens = [rng.uniform(20, 200) for _ in range(count)]
    return [Step((fixed + each * n) * math.exp(rng.gauss(0, noise)), n) for n in tokens]


def of(seconds: list[float]) -> Estimate:
    return estimate([math.log(value) for value in seconds])


def learned(steps: list[Step]) -> Correction:
    found = present(learn(steps))
    return found


def test_the_interval_of_a_trial_is_narrower_and_holds_the_truth() -> None:
    correction = learned(steps_of(LEARNING_STEPS, seed=1))
    assert correction.seconds_each == pytest.approx(0.001, rel=0.05)
    assert correction.narrowed < 0.2
    truth = math.log(0.03 + 0.001 * correction.usual)
    narrower, holds = [], []
    for seed in range(2, 102):
        # Of a configuration that communicates in 30 ms, where the default took 50.
        trial = steps_of(7, seed=seed, fixed=0.03)
        without = of([step.seconds for step in trial])
        found = of(correction.seconds(trial))
        narrower.append(found.half_width / without.half_width)
        holds.append(found.low <= truth <= found.high)
    assert median(narrower) < 0.1
    assert fmean(holds) > 0.85


def test_a_checkpoint_and_a_wrong_complexity_do_not_move_what_is_learned() -> None:
    steps = steps_of(LEARNING_STEPS)
    steps[3] = steps[3]._replace(seconds=30.0)
    steps[9] = steps[9]._replace(complexity=1e12)
    assert learned(steps).seconds_each == pytest.approx(0.001, rel=0.1)
    wild = [Step(0.1, 1e18), *steps_of(9, seed=5)]
    assert of(learned(steps).seconds(wild)).half_width < 0.05


def test_a_random_complexity_is_hardly_ever_believed() -> None:
    rng = random.Random(0)
    believed = 0
    for seed in range(1000):
        steps = steps_of(LEARNING_STEPS, seed=seed)
        believed += learn([step._replace(complexity=rng.random()) for step in steps]) is not None
    assert believed < 10


@pytest.mark.parametrize("count", [0, 1, LEARNING_STEPS - 1])
def test_few_steps_teach_nothing(count: int) -> None:
    assert learn(steps_of(count)) is None


def test_a_trial_that_does_not_wait_for_its_data_is_left_as_it_is() -> None:
    correction = learned(steps_of(LEARNING_STEPS))
    flat = steps_of(7, fixed=0.3, each=0.0)
    assert correction.seconds(flat) == [step.seconds for step in flat]


def test_steps_of_one_complexity_are_brought_to_the_usual_one() -> None:
    """As in an epoch that begins with its shortest samples: their interval is narrow either way."""
    correction = learned(steps_of(LEARNING_STEPS))
    short = [step._replace(complexity=25.0, seconds=0.075) for step in steps_of(7)]
    expected = 0.075 + correction.seconds_each * (correction.usual - 25.0)
    assert correction.seconds(short) == [pytest.approx(expected)] * 7


class Training:
    """Ranks whose steps have 20 to 200 tokens: a step computes for as long as they take, and then
    communicates as the configuration lets it."""

    def __init__(self, tuner: Tuner, hint: Hint, seed: int = 0, ranks: int = 4) -> None:
        self.tuner, self.hint, self.ranks = tuner, hint, ranks
        self.rng = random.Random(seed)
        self.chance = random.Random(seed + 1)
        self.step = 0
        tuner.register("job", make_spec(limits={"warmup_seconds": 0, "max_samples": 12}))

    def communication(self, configuration: Mapping[str, Value]) -> float:
        return 0.5 * peaked(configuration)

    def run(self, most_steps: int = 3000) -> None:
        while self.step < most_steps and (trial := self.tuner.open_trial("job")) is not None:
            self.report(trial.index, trial.configuration)

    def report(self, trial: int, configuration: Mapping[str, Value], count: int = 3) -> None:
        found = []
        for _ in range(count):
            self.step += 1
            tokens = self.rng.uniform(20, 200)
            took = 0.001 * tokens + self.communication(configuration)
            took *= math.exp(self.rng.gauss(0, NOISE))
            told = self.hint(self.chance, tokens)
            found.append(Observation(self.step, (took,) * self.ranks, None, told))
        self.tuner.observe("job", trial, found)

    @property
    def widths(self) -> list[float]:
        """How wide the interval of each measured trial of the search is, relative."""
        trials = every_trial(self.tuner.store, "job")
        return [
            (t.high - t.low) / t.seconds
            for t in trials
            if t.purpose == "search" and t.seconds and t.high and t.low is not None
        ]


@cache
def trained(kind: str, seed: int) -> Training:
    """One that was tuned to the end."""
    training = Training(Tuner(Store("sqlite://")), HINTS[kind], seed)
    training.run()
    return training


def gain_of(training: Training) -> float:
    """Of what was kept over the default, at the mean number of tokens."""
    kept = training.tuner.status("job").configuration
    default = training.tuner.store.jobs.get("job").baseline
    before, after = (training.communication(c) + 0.11 for c in (default, kept))
    return before / after - 1


HINTS: dict[str, Hint] = {
    "tokens": lambda rng, tokens: tokens,
    "none": lambda rng, tokens: None,
    "constant": lambda rng, tokens: 7.0,
    "random": lambda rng, tokens: rng.random(),
    "falling": lambda rng, tokens: 1000.0 - tokens,
    "at times": lambda rng, tokens: tokens if rng.random() < 0.5 else None,
}


@pytest.mark.parametrize("seed", range(2))
def test_intervals_are_narrow_and_what_is_kept_is_right_where_it_is_not_without(seed: int) -> None:
    told, untold = trained("tokens", seed), trained("none", seed)
    assert median(told.widths) < 0.2 * median(untold.widths)
    result = present(told.tuner.status("job").result)
    assert result.kept == "winner"
    assert result.low <= 1 + gain_of(told) <= result.high
    assert gain_of(told) > 0.08
    assert gain_of(untold) < gain_of(told)
    assert untold.step > told.step


@pytest.mark.parametrize("kind", ["constant", "random", "falling", "at times"])
def test_a_silly_complexity_is_not_used(kind: str) -> None:
    training = trained(kind, 1)
    notes = [e.message for e in training.tuner.store.events.of("job") if e.kind == "note"]
    assert notes == [] or "is not used" in notes[0]
    for trial in training.tuner.store.trials.of("job"):
        costs = [
            step.cost for step in training.tuner.store.observations.step_costs("job", trial.index)
        ]
        assert trial.estimate is not None
        # The centre is that of the times as they were, of some of the steps.
        assert min(costs) <= trial.estimate.center <= max(costs)
    assert training.tuner.status("job").result is not None


def test_the_job_says_that_it_is_used() -> None:
    training = trained("tokens", 0)
    (note,) = [e for e in training.tuner.store.events.of("job") if e.kind == "note"]
    assert isinstance(note, Event)
    assert note.trial == 0
    assert note.message.startswith("step times are corrected to a batch complexity of 1")


def test_steps_that_come_after_the_first_trial_was_closed_change_nothing() -> None:
    """The ranks go on with it until the next one is chosen, and here no longer say how much."""
    tuner = Tuner(Store("sqlite://"))
    training = Training(tuner, HINTS["tokens"])
    while (trial := tuner.open_trial("job")) and trial.index == 0:
        training.report(0, trial.configuration)
    training.hint = HINTS["none"]
    training.report(0, tuner.store.jobs.get("job").baseline)
    training.hint = HINTS["tokens"]
    training.run()
    assert median(training.widths) < 0.1


def test_the_first_trial_of_a_later_round_teaches_anew() -> None:
    training = Training(Tuner(Store("sqlite://")), HINTS["tokens"])
    training.run()
    training.step += 1000
    training.tuner.take_event("job", Event("drift", None, training.step, "slower"))
    training.run(6000)
    assert training.tuner.status("job").result is not None
    notes = [e for e in training.tuner.store.events.of("job") if e.kind == "note"]
    of_rounds = [training.tuner.store.trials.get("job", note.trial or 0).round for note in notes]
    assert of_rounds == [0, 1]


def test_the_default_teaches_for_some_steps_and_other_trials_are_short() -> None:
    training = trained("tokens", 0)
    first, *others = every_trial(training.tuner.store, "job")
    assert first.steps + first.outliers >= LEARNING_STEPS
    assert median(trial.steps + trial.outliers for trial in others) <= 7
