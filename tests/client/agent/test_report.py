"""How often the ranks report."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

from bagua_client import DistributedDataParallel
from bagua_client.agent import Agent
from bagua_client.agent.report import (
    MOST_FOR_COST,
    MOST_REDUCTIONS,
    MOST_WAITED_STEPS,
    SUSPICIOUS_REDUCTIONS,
    Pace,
)
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.measuring import rank_measurement
from bagua_client.measuring.clock import CpuClock
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("step_seconds", "message_seconds", "reductions"),
    [
        (1.0, 0.001, 1),
        (0.1, 0.0, 1),
        (0.05, 0.0, 2),
        (0.05, 0.0005, 3),  # 0.4 % of 3 steps of 50 ms
        (0.05, 0.1, MOST_FOR_COST),
        (0.001, 0.0, MOST_REDUCTIONS),
    ],
)
def test_reports_are_as_frequent_as_they_are_cheap(
    monkeypatch: pytest.MonkeyPatch, step_seconds: float, message_seconds: float, reductions: int
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    for _ in range(20):
        pace.took(message_seconds)
    assert pace.until_next(0) == 1  # no step is known yet
    now = 10 * step_seconds
    assert pace.until_next(10) == reductions


@pytest.mark.parametrize("message_seconds", [0.0, 0.001, 0.1])
def test_a_watched_job_reports_seldom_and_more_often_when_times_seem_to_change(
    monkeypatch: pytest.MonkeyPatch, message_seconds: float
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    for _ in range(20):
        pace.took(message_seconds)
    assert pace.until_next(0, False) == 24
    now = 0.5
    assert pace.until_next(10, True) == SUSPICIOUS_REDUCTIONS


def test_one_slow_report_does_not_make_the_next_ones_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    for seconds in (0.0, 0.0, 0.0, 1.0):
        pace.took(seconds)
    pace.until_next(0)
    now = 1.0
    assert pace.until_next(10) == 1


def test_a_thread_that_runs_ahead_of_its_gpu_does_not_make_reports_rare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, reductions = 0.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    found = []
    for report in range(20):
        # Steps of 100 ms: six are launched at once, then their time is waited for.
        reductions += 6 if report % 2 else 1
        now += 0.001 if report % 2 else 0.7
        found.append(pace.until_next(reductions))
    assert max(found[4:]) <= 3


LAYERS = 20
BIG, MANY = {"bucket_bytes": 2**20}, {"bucket_bytes": 1024}
CHANNELS = {**MANY, "channels": 2}
MOST_STEPS = 4000

Seen = list[tuple[int | None, dict[str, Any], bool]]


class _MadeUpClock(CpuClock):
    """Each of its marks comes so much later than the one before."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds

    def mark(self) -> float:
        self.now += self._seconds
        return self.now


def _tuning(url: str, find_unused: bool, mark_seconds: float) -> Seen:
    """For each step that is measured or follows the tuning: its trial, what is in force, and
    whether our hook saw its buckets."""
    clock = mock.patch.object(
        rank_measurement, "clock_for", return_value=_MadeUpClock(mark_seconds)
    )
    with clock, tuned_at(url):
        layers = [torch.nn.Linear(16, 16) for _ in range(LAYERS)]
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers), find_unused_parameters=find_unused
        )
    tunable = tunable_of(model)
    agent = tunable.listener
    assert isinstance(agent, Agent)
    found: Seen = []
    starts = tunable.observation.bucket_starts
    after = 10
    with mock.patch.object(tunable.observation, "bucket_starts", wraps=starts) as seen:
        for _ in range(MOST_STEPS):
            seen.reset_mock()
            spans = agent.measurement.spans
            is_measured = bool(spans) and spans[-1].is_in_force
            trial, values = spans[-1].trial if spans else None, model.configuration.values
            model(torch.ones(1, 16)).sum().backward()
            if is_measured:
                found.append((trial, values, seen.called))
            time.sleep(0.001)
            after -= not model.is_tuning
            if not after:
                break
    return found


def _hooked_by_trial(found: Seen) -> dict[int | None, set[bool]]:
    by_trial: dict[int | None, set[bool]] = {}
    for trial, _, hooked in found:
        by_trial.setdefault(trial, set()).add(hooked)
    return by_trial


def _run(
    pool: RankPool,
    trials: list[dict[str, Any]],
    find_unused: bool = False,
    mark_seconds: float = 1e-6,
) -> tuple[dict[int | None, set[bool]], Counter[tuple[int, int]]]:
    """Whether a hook saw the measured steps of each trial; and how many profiles there were of
    each trial, with their numbers of buckets."""
    with ScriptedService([trials], steps=6) as service:
        one, other = pool.run(_tuning, service.url, find_unused, mark_seconds)
        profiles = service.bodies("profiles")
    assert _hooked_by_trial(one) == _hooked_by_trial(other)
    counted = Counter((each["trial"], len(each["buckets"])) for each in profiles)
    return _hooked_by_trial(one), counted


@pytest.mark.slow
def test_a_configuration_with_many_buckets_is_recorded_before_it_is_measured_without_a_hook(
    two_ranks: RankPool,
) -> None:
    hooked, profiles = _run(two_ranks, [BIG, MANY, CHANNELS, BIG])
    assert hooked[0] == {True}
    assert hooked[1] == {False}
    assert hooked[2] == {True}
    assert profiles[0, 1] > 0
    assert profiles[1, LAYERS] > 0
    assert profiles[2, LAYERS] > 0


def test_in_long_steps_the_hook_takes_a_small_part_and_stays(two_ranks: RankPool) -> None:
    hooked, profiles = _run(two_ranks, [BIG, MANY, BIG, MANY], mark_seconds=1.0)
    assert [hooked[trial] for trial in range(4)] == [{True}, {True}, {False}, {False}]
    assert {trial for trial, _ in profiles} == {0, 1}


@pytest.mark.slow
def test_what_is_tried_again_is_measured_as_it_would_be_kept(two_ranks: RankPool) -> None:
    hooked, profiles = _run(two_ranks, [BIG, MANY, BIG, MANY, CHANNELS, CHANNELS, BIG, MANY])
    assert [hooked[trial] for trial in range(8)] == [
        {True},
        *[{False}] * 3,
        *[{True}] * 2,
        *[{False}] * 2,
    ]
    assert hooked[None] == {False}
    assert {trial for trial, _ in profiles} == {0, 1, 4, 5}


def test_a_model_that_may_leave_gradients_out_keeps_its_hook(two_ranks: RankPool) -> None:
    hooked, profiles = _run(two_ranks, [BIG, MANY, BIG, MANY], find_unused=True)
    assert all(seen == {True} for seen in hooked.values())
    assert {trial for trial, _ in profiles} == {0, 1, 2, 3}


def _waiting(url: str) -> tuple[bool, list[bool]]:
    """Whether the job is still tuned after some steps, and whether each had the hook."""
    with tuned_at(url):
        model = DistributedDataParallel(torch.nn.Linear(16, 16))
    tunable = tunable_of(model)
    hooked = []
    for _ in range(MOST_WAITED_STEPS + 10):
        model(torch.ones(1, 16)).sum().backward()
        hooked.append(tunable.is_hooked)
    return model.is_tuning, hooked


def test_a_job_that_waits_long_does_so_without_a_hook(two_ranks: RankPool) -> None:
    with ScriptedService([[BIG]], refuses={"PUT": 503}) as service:
        for is_tuning, hooked in two_ranks.run(_waiting, service.url):
            assert is_tuning
            assert hooked[:10] == [True] * 10
            assert hooked[-5:] == [False] * 5
