"""Small runs of the benchmark of rates, beside Bagua's real service and on a real PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rates import (
    BAGUA,
    OURS,
    TUNED_PAUSE_SECONDS,
    Condition,
    measure_beside,
    show_beside,
    show_cluster,
)
from benchmarks.support import mixed_clients, mixed_jobs, one_process
from benchmarks.support.many_jobs import Load, measure
from benchmarks.support.scrapes import PASTS, Past, measure_past
from tests.autotune.store.postgresql import find_binaries
from tests.outside import BAGUA as BAGUA_RELEASE
from tests.outside import folder_of

pytestmark = pytest.mark.slow

PATIENCE = 5
"""On a machine that is busy with other work a short run may see no decision."""


def test_both_services_are_measured_while_they_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(BAGUA_RELEASE)
    monkeypatch.setattr("benchmarks.rates.TUNED_SETTLING_SECONDS", 0.5)
    condition = Condition(True, connections=2, seconds=3.0, pause_seconds=TUNED_PAUSE_SECONDS)
    for _ in range(PATIENCE):
        windows = list(measure_beside(condition, rounds=1))
        if all(each.proposals_per_second for each in windows):
            break
    assert [each.service for each in windows] == [BAGUA, OURS]
    for each in windows:
        assert each.pairs_per_second > 0
        assert each.proposals_per_second > 0, "models are tuned while it is measured"
        assert 0 < each.health_median_ms <= each.health_p95_ms
    show_beside(windows)
    assert "health check below 50 ms: " in capsys.readouterr().out


def test_jobs_report_on_time_and_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr("benchmarks.support.many_jobs.EVERY_SECONDS", 0.5)
    monkeypatch.setattr("benchmarks.support.many_jobs.SETTLING_SECONDS", 1.0)
    for _ in range(PATIENCE):
        load = measure(jobs=4, replicas=2, seconds=4.0, is_warming_up=False)
        if load.trials_per_second:
            break
    assert load.errors == 0
    assert load.reports_per_second == 8.0, "4 jobs, every half a second"
    assert load.trials_per_second > 0, "decisions are made meanwhile"
    assert len(load.replica_cores) == 2
    assert min(load.replica_cores) > 0
    assert load.database_cores > 0


def test_jobs_are_tuned_while_others_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr(mixed_clients, "STEP_SECONDS", 0.25)
    monkeypatch.setattr(mixed_jobs, "SETTLING_SECONDS", 2.0)
    monkeypatch.setattr(mixed_clients, "LEASE_SECONDS", 1.0)
    for _ in range(PATIENCE):
        found = mixed_jobs.measure_mixed(jobs=4, watching=3, replicas=2, seconds=20.0)
        if found.steps:
            break
    assert found.errors == 0
    assert 0 < found.reports_per_second <= found.offered_per_second <= 8.0
    assert sum(found.connections) == 2 + 2 + 3, "one of each job"
    assert found.lease_p99_ms > 0
    assert min(found.steps.values()) > 10, "a tuning has several trials"
    assert found.database_mib > 0


def test_an_hour_is_a_tuning_copied_as_often_as_jobs_are_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr(mixed_jobs, "HOUR_SECONDS", 400.0)
    hour = mixed_jobs.measure_hour(jobs=6, watching=2)
    assert 3 < hour.tunings < 60, "3 jobs make 200 steps each"
    assert hour.observations % hour.tunings == 0
    assert 10 * hour.tunings < hour.observations <= 600


def test_one_process_takes_reports_and_is_judged_by_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_process, "JOBS", 16)
    rate = one_process.measure_rate(f"sqlite:///{tmp_path}/store.db", seconds=1.0)
    assert (rate.database, rate.goal) == ("sqlite", 1200.0)
    assert rate.reports_per_second > 0
    assert rate.cpu_ms > 0
    assert 0 < rate.median_ms <= rate.p99_ms


@pytest.mark.parametrize(("past", "shown"), list(zip(PASTS, (3, 3, 22), strict=True)))
def test_a_store_of_jobs_that_are_over_is_scraped(past: Past, shown: int) -> None:
    found = measure_past(past, jobs=20, live=2, scrapes=2)
    assert found.shown == shown, "one of them has just ended"
    assert min(found.first_ms, *found.still_ms, *found.changed_ms) > 0
    assert (len(found.still_ms), len(found.changed_ms)) == (2, 2)


def test_a_goal_that_is_missed_says_what_holds_and_what_bounds_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(jobs: int, p99_ms: float, errors: int = 0) -> Load:
        return Load(jobs, True, jobs / 2, 1.0, p99_ms, errors, 0.0, (0.95, 0.2), 0.1, 0.0)

    show_cluster([load(8, 500.0), load(4, 50.0, errors=1), load(2, 50.0)])
    told = capsys.readouterr().out
    assert "500.0 ms, 0 errors: missed" in told
    assert "2 jobs hold; at 8 the bound is a replica" in told
