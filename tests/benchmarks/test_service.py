"""Small runs of the benches of the service, and what they say of long runs: the faults that are
made, the fuzzer, its rates, the soak.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from benchmarks import soak
from benchmarks.rates import show_cluster
from benchmarks.soak import Sample, by_tenth, show
from benchmarks.support.fault_injection import trouble as module
from benchmarks.support.fault_injection.trouble import FaultyProxy, Report
from benchmarks.support.fault_injection.tunings import audit
from benchmarks.support.rates import load
from benchmarks.support.rates.cluster import Load, measure
from benchmarks.support.rates.scrapes import PASTS, measure_past
from tests.autotune.server import ServeProcess
from tests.autotune.store.postgresql import find_binaries
from tests.autotune.support import registration

pytestmark = pytest.mark.slow

SILENT = ("drop", "lose", "half")  # the client has no answer
TAKEN = ("delay", "duplicate", "repeat late", "")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Its port and its database."""
    database = tmp_path_factory.mktemp("service") / "store.db"
    with ServeProcess(database) as running:
        yield int(running.url.rpartition(":")[2]), database


def _report(url: str, step: int) -> int:
    """Tell a step of the first trial; the status, 0 if there was no answer."""
    steps = [{"step": step, "seconds": [0.25] * 4}]
    try:
        answer = requests.post(f"{url}/observations", json={"trial": 0, "steps": steps}, timeout=30)
        answer.json()
    except requests.RequestException:
        return 0
    return answer.status_code


def test_each_fault_is_what_it_says_and_the_books_are_right(
    service: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, database = service
    monkeypatch.setattr(module, "LONGEST_DELAY_SECONDS", 0.01)
    with FaultyProxy(port, seed=1, every=1) as proxy:
        url = f"{proxy.url}/api/v2/jobs/job"
        monkeypatch.setattr(module, "FAULTS", ("",))
        assert requests.put(url, json=registration(), timeout=30).ok
        for step, fault in enumerate((*SILENT, *TAKEN, "garble", "garble answer")):
            monkeypatch.setattr(module, "FAULTS", (fault,))
            status = _report(url, step)
            if fault in TAKEN:
                assert status == 200, fault
            elif fault == "garble":
                assert 400 <= status < 500
            else:
                assert status == 0, fault
        proxy.is_cut.set()
        monkeypatch.setattr(module, "HANG_SECONDS", 0.01)
        assert _report(url, 100) == 0
    assert len(proxy.acknowledged) == len(TAKEN)
    stored = f"sqlite:///{database}"
    books = audit(stored, proxy.acknowledged)
    assert (books.acknowledged, books.lost, books.damage) == (len(TAKEN), [], [])
    never = Report("job", "observations", {"trial": 0, "steps": [{"step": 7000, "seconds": [1.0]}]})
    (lost,) = audit(stored, [*proxy.acknowledged, never]).lost
    assert "7000" in lost


def test_the_same_seed_makes_the_same_faults() -> None:
    made = []
    for _ in range(2):
        proxy = FaultyProxy(1, seed=5)
        made.append([proxy.next_fault() for _ in range(300)])
        proxy._server.server_close()
    assert made[0] == made[1]
    assert sum(bool(fault) for fault, _ in made[0]) == 30


ROOT = Path(__file__).parents[2]


def test_a_few_wrong_requests_leave_the_service_as_it_was() -> None:
    command = [sys.executable, "benchmarks/fuzz.py", "--requests", "50"]
    command += ["--slowest-seconds", "60"]  # of a service beside other tests
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 answered by 5xx or with a traceback; 0 in the log" in run.stdout
    assert run.stdout.endswith("store: intact\n")


PATIENCE = 5
"""On a machine that is busy with other work a short run may see no decision."""


def test_jobs_report_on_time_and_are_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr("benchmarks.support.rates.cluster.EVERY_SECONDS", 0.5)
    monkeypatch.setattr("benchmarks.support.rates.cluster.SETTLING_SECONDS", 1.0)
    for _ in range(PATIENCE):
        found = measure(jobs=4, replicas=2, seconds=4.0, is_warming_up=False)
        if found.trials_per_second:
            break
    assert found.errors == 0
    assert found.reports_per_second == 8.0, "4 jobs, every half a second"
    assert found.trials_per_second > 0, "decisions are made meanwhile"
    assert len(found.replica_cores) == 2
    assert min(found.replica_cores) > 0
    assert found.database_cores > 0


def test_one_process_takes_reports_and_is_judged_by_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "JOBS", 16)
    rate = load.measure_rate(f"sqlite:///{tmp_path}/store.db", seconds=1.0)
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
    def of(jobs: int, p99_ms: float, errors: int = 0) -> Load:
        return Load(jobs, True, jobs / 2, 1.0, p99_ms, errors, 0.0, (0.95, 0.2), 0.1, 0.0)

    show_cluster([of(8, 500.0), of(4, 50.0, errors=1), of(2, 50.0)])
    told = capsys.readouterr().out
    assert "500.0 ms, 0 errors: missed" in told
    assert "2 jobs hold; at 8 the bound is a replica" in told


FLAT = [Sample(float(i), i * 10, i, 200 * 2**20, 20, 30, 20 * 2**20, 0.1) for i in range(1, 101)]


def test_jobs_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "RESTLESS_REPORTS", (1, 1))
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 0.2)
    samples = soak.measure(most=300, keep_seconds=6, seed=0, is_postgresql=False)
    last = samples[-1]
    assert last.observations >= 300
    assert last.jobs > 0
    assert last.memory_bytes > 2**25
    assert last.threads > 1
    assert last.files > 3
    assert last.database_bytes > 2**16
    assert last.look_seconds > 0


def test_the_highest_of_each_tenth_is_told() -> None:
    peak = replace(FLAT[44], memory_bytes=300 * 2**20)
    tenths = by_tenth([*FLAT[:44], peak, *FLAT[45:]], most=1000)
    assert [each.memory_bytes > 200 * 2**20 for each in tenths].index(True) == 4
    assert len(tenths) == 10
    assert show(tenths), "only the last tenth counts"


@pytest.mark.parametrize("name", ["memory_bytes", "threads", "files", "database_bytes"])
def test_growth_is_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(by_tenth(FLAT, most=1000))
    grown = [replace(each, **{name: getattr(each, name) * i}) for i, each in enumerate(FLAT, 1)]
    assert not show(by_tenth(grown, most=1000))
    assert capsys.readouterr().out.count("TOO MUCH") == 1
