"""The benchmark of a full store, on a small one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.filled_store import Filling
from benchmarks.service import measure


def test_a_small_store_is_measured(tmp_path: Path) -> None:
    answers = measure(tmp_path, Filling(jobs=4, active=2, trials=3), repeats=2)
    found = {answer.request: answer for answer in answers}
    assert {"/", "/metrics", "/metrics, 2 changed", "overview"} <= found.keys()
    for answer in answers:
        assert 0 < answer.median_ms <= answer.p95_ms
        assert (answer.body_bytes == 0) == answer.request.endswith("304")
