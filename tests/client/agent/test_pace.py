"""How often the ranks report."""

from __future__ import annotations

import time

import pytest

from bagua_client.agent.pace import MOST_FOR_COST, MOST_REDUCTIONS, SUSPICIOUS_REDUCTIONS, Pace


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
