"""benchmarks/recomputation.py tunes a training, sweeps it by hand, and prints both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "recomputation.py"


def test_a_small_model_is_tuned_and_swept(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--smoke", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=True)
    (file,) = (each for each in tmp_path.glob("*.json") if ".spec" not in each.name)
    found = json.loads(file.read_text())
    assert list(found["sweep"]) == ["4 of 4", "3 of 4", "2 of 4", "1 of 4", "0 of 4", "found"]
    assert all(row["seconds"] for row in found["sweep"].values())
    assert found["tuning"]["trials"] > 1
    for name in found["sweep"]:
        assert f"\n{name} " in done.stdout
