"""Small runs of the benchmark of rates, on a real PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rates import show_cluster
from benchmarks.support.rates import limit
from benchmarks.support.rates.cluster import Load, measure
from benchmarks.support.rates.scrapes import PASTS, measure_past
from tests.autotune.store.postgresql import find_binaries

pytestmark = pytest.mark.slow

PATIENCE = 5
"""On a machine that is busy with other work a short run may see no decision."""


def test_jobs_report_on_time_and_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr("benchmarks.support.rates.cluster.EVERY_SECONDS", 0.5)
    monkeypatch.setattr("benchmarks.support.rates.cluster.SETTLING_SECONDS", 1.0)
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


def test_one_process_takes_reports_and_is_judged_by_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit, "JOBS", 16)
    rate = limit.measure_rate(f"sqlite:///{tmp_path}/store.db", seconds=1.0)
    assert (rate.database, rate.goal) == ("sqlite", 1200.0)
    assert rate.reports_per_second > 0
    assert rate.cpu_ms > 0
    assert 0 < rate.median_ms <= rate.p99_ms


@pytest.mark.parametrize(("place", "shown"), [(0, 3), (-1, 22)])
def test_a_store_of_jobs_that_are_over_is_scraped(place: int, shown: int) -> None:
    found = measure_past(PASTS[place], jobs=20, live=2, scrapes=2)
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
