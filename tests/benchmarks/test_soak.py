"""A short soak of a real service, and what is said of a long one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import soak
from benchmarks.soak import Sample, by_tenth, show

pytestmark = pytest.mark.slow

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
