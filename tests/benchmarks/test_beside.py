"""The same tunings by the service of another checkout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import tuning
from benchmarks.support.noise import figures, tunings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_regret_is_against_the_best_of_what_either_side_knows() -> None:
    job = {"problem": "a", "seed": 1, "baseline_seconds": 3.0}
    mine = {**job, "kept_seconds": 2.2, "best_seconds": 2.0, "regret": 0.1, "steps": 80}
    theirs = {**job, "kept_seconds": 2.2, "best_seconds": 2.2, "regret": 0.0}
    for rows in figures.joined([mine], [theirs]):
        assert rows[0]["regret"] == pytest.approx(0.1)
    assert figures.difference([mine, mine], [{**theirs, "steps": 90}] * 2).startswith(
        "regret +10.0 % (±0.0)"
    )
    with pytest.raises(ValueError, match="not the same job"):
        figures.joined([mine], [{**theirs, "baseline_seconds": 4.0}])


def test_a_checkout_beside_itself_differs_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of few climates, and both in this checkout."""
    steady = [climate for climate in tunings.CLIMATES if climate.name == "steady"]
    monkeypatch.setattr(tunings, "CLIMATES", steady)
    monkeypatch.setattr(figures, "rows_of", lambda *_: {"noise": tunings.run(1, 1, draw=77)})
    written = tmp_path / "found.json"
    options = ["--parts=noise", "--tunings=1", "--draw=77", "--processes=1"]
    options += ["--beside", str(ROOT), "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["tuning.py", *options])
    tuning.main()
    assert "regret +0.0 %" in capsys.readouterr().out
    found = json.loads(written.read_text())["figures"]
    for line in ("all of them", "steady"):
        assert found[f"noise: {line}"] == found[f"noise: {line}, beside"]
