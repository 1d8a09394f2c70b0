"""The most that a job can gain, from the default's own steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bagua_autotune.measuring.ceiling import ceiling
from bagua_autotune.model.job import Job, Observation
from bagua_autotune.model.knobs import Categorical
from bagua_wire.knobs import ALGORITHM_KNOB, RECOMPUTED_KNOB
from tests.autotune.views.jobs import job

EXPOSED_SHARE = 57 / 921


def steps(count: int = 7, seed: int = 0, noise: float = 0.3) -> list[Observation]:
    """Of a machine on which the same step takes up to twice as long as another; its slowest rank
    waits for communication for one part in 16."""
    rng = random.Random(seed)
    found = []
    for step in range(count):
        seconds = 0.921 * rng.lognormvariate(0.0, noise)
        computing = (1 - EXPOSED_SHARE) * seconds * rng.lognormvariate(0.0, 0.005)
        found.append(Observation(step, (seconds, seconds), (0.8 * computing, computing)))
    return found


def test_a_step_can_be_shorter_by_what_computing_does_not_hide_of_it() -> None:
    found = ceiling(job(), steps(noise=0.0))
    assert found is not None
    assert found.seconds == pytest.approx(0.921)
    assert found.exposed_seconds == pytest.approx(0.057, rel=0.1)
    assert found.speedup == pytest.approx(1.07, abs=0.015)


def test_it_is_an_upper_bound_that_noise_of_the_machine_does_not_widen() -> None:
    found = [ceiling(job(), steps(seed=seed)) for seed in range(200)]
    speedups = [each.speedup for each in found if each]
    truth = 1 / (1 - EXPOSED_SHARE)
    assert sum(speedup >= truth for speedup in speedups) > 0.94 * 200
    assert sorted(speedups)[-10] < truth + 0.02


def test_it_is_unknown_where_the_default_s_steps_do_not_tell_it() -> None:
    told = steps()
    silent = [replace(each, compute=(0.5, None)) for each in told]
    assert ceiling(job(), silent) is None
    assert ceiling(job(), told[:2]) is None, "of two steps nobody knows how sure they are"
    bagua: Job = replace(job(), protocol="v1")
    assert ceiling(bagua, told) is None, "speeds are no times"
    algorithms = Categorical(values=("gradient_allreduce", "async"))
    apart = replace(job(), space={ALGORITHM_KNOB: algorithms})
    assert ceiling(apart, told) is None, "ranks that do not wait are bounded by no slowest one"
    recomputed = replace(job(), space={RECOMPUTED_KNOB: Categorical(values=(12, 0))})
    assert ceiling(recomputed, told) is None, "computing itself may take less time"
