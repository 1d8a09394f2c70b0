"""The benchmark of a full store, on a small one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.filled_store import Filling
from benchmarks.service import measure


def test_a_small_store_is_measured(tmp_path: Path) -> None:
    answers, scrapes_behind = measure(tmp_path, Filling(jobs=4, active=2, trials=3), repeats=2)
    assert scrapes_behind >= 1
    found = {answer.request: answer for answer in answers}
    assert {
        "/metrics",
        "/metrics, 2 changed",
        "/metrics, all changed",
        "the page",
        "the page, all changed",
        "a job's overview",
    } <= found.keys()
    for answer in answers:
        assert 0 < answer.median_ms <= answer.p95_ms
        # The shell of the page is asked for beside its list, and has an ETag of its own.
        is_empty = answer.request == "list of 1,000, 304"
        assert (answer.body_bytes == 0) == is_empty
