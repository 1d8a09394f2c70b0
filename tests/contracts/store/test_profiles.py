"""Profiled steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_autotune.model.job import Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.errors import UnknownTrial
from bagua_autotune.store.events import MOST_PROFILES
from bagua_autotune.store.trials import Move
from bagua_wire.profile import Profile
from tests.autotune.store.samples import BASELINE, FIRST, MEASURED, PROFILE


def profile(step: int) -> Profile:
    return replace(PROFILE, step=step)


def test_profiles_come_back_by_trial_and_step(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    following = Trial(1, "search", BASELINE)
    store.trials.advance(job, Move(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=following))
    for index, step in ((1, 40), (0, 9), (0, 7)):
        assert store.profiles.add(job, index, profile(step), 5.0)
    assert store.profiles.of(job) == [(0, profile(7)), (0, profile(9)), (1, profile(40))]
    assert store.profiles.of(job, 1) == [(1, profile(40))]
    assert store.jobs.get(job).last_contact_at == 5.0
    assert store.trials.get(job, 1).state == "proposed"
    with pytest.raises(UnknownTrial):
        store.profiles.of(job, 2)


def test_a_step_is_profiled_once_and_few_of_a_trial_are(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    steps = (3, 3, *range(10, 20))
    taken = [store.profiles.add(job, 0, profile(step), 2.0) for step in steps]
    assert taken == [True, False] + [True] * (MOST_PROFILES - 1) + [False] * 6
    assert [found.step for _, found in store.profiles.of(job)] == [3, 10, 11, 12, 13]


def test_the_latest_profiles_are_read_alone(store: Store, job: str) -> None:
    assert store.profiles.latest(job, 3) == []
    store.trials.advance(job, FIRST)
    profiles = [replace(PROFILE, step=step) for step in (7, 8, 9)]
    for profile in profiles:
        store.profiles.add(job, 0, profile, 1.0)
    store.trials.advance(job, MEASURED)
    assert store.profiles.latest(job, 2) == profiles[1:]
    assert store.profiles.latest(job, 2, trial=1) == []
