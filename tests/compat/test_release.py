"""Bagua's own tests from its release, unmodified: helpers, store, data (all: make upstream).

None of those for GPUs, which fail where ranks have not ended within a minute.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.upstream_bagua import run
from tests.upstream_bagua.running import PASSED, SKIPPED, copy_release, run_file

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("file", "passed", "skipped"),
    [
        ("torch_api/test_utils.py", 1, 0),
        ("contrib/test_load_balancing_data_loader.py", 2, 0),
        ("contrib/test_cached_dataset.py", 1, 0),
        ("contrib/test_store.py", 2, 0),
    ],
)
def test_without_a_gpu(
    file: str, passed: int, skipped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file in ("contrib/test_cached_dataset.py", "contrib/test_store.py"):
        pytest.importorskip("redis")
        if shutil.which("redis-server") is None:
            pytest.skip("no redis-server here (apt-get install redis-server)")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # With a GPU they would be skipped.
    copy_release(tmp_path)
    results = list(run_file(tmp_path, file, devices=0))
    found = Counter(result.outcome for result in results)
    assert found == Counter({PASSED: passed, SKIPPED: skipped}), results


def test_a_run_without_time_begins_no_file_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--devices", "0", "--only", "test_utils", "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("INCOMPLETE: not begun within 0 s: torch_api/test_utils.py\n")
