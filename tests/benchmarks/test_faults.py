"""The faults that the bench makes, and what it finds lost; whole tunings are the bench itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from benchmarks.support.fault_injection import trouble as module
from benchmarks.support.fault_injection.trouble import FaultyProxy, Report
from benchmarks.support.fault_injection.tunings import audit
from tests.autotune.server import ServeProcess
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
