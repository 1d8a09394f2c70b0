"""The benchmark of sharded models: what it sweeps, and a small run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sharded

pytestmark = pytest.mark.slow


def test_each_setting_is_swept_once_under_a_name_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = ["bfloat16", "quantized"]
    monkeypatch.setattr(sys, "argv", ["sharded.py", "--gpus", "0", "0", "--allow", *allowed])
    exact, narrow = sharded.swept(12, sharded.arguments())
    names = [arm["name"] for arm in [*exact, *narrow]]
    assert len(set(names)) == len(names) == 41
    assert exact[0] == {"name": sharded.DEFAULT, "kind": "sharded, ours", "configuration": {}}
    used = [arm["configuration"] for arm in narrow]
    assert [each.get("wire_precision") for each in used] == ["bf16"] * 8 + [None] * 8
    assert [each.get("algorithm") for each in used] == [None] * 8 + ["quantized"] * 8


@pytest.mark.parametrize(("copies", "has_ways"), [("1", True), ("2", False)])
def test_ways_across_nodes_are_swept_where_one_copy_is_spread_over_nodes_of_several_ranks(
    copies: str, has_ways: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--gpus", "0", "1", "2", "3", "--hosts", "2", "--copies", copies]
    monkeypatch.setattr(sys, "argv", ["sharded.py", *given])
    exact, _ = sharded.swept(12, sharded.arguments())
    names = [arm["name"] for arm in exact]
    assert len(set(names)) == len(names)
    ways = {key for arm in exact for key in arm["configuration"]} & {"hierarchical", "node_copy"}
    assert ways == ({"hierarchical", "node_copy"} if has_ways else set())


@pytest.mark.parametrize(("given", "count"), [([], 9), (["--recompute"], 17)])
def test_of_micro_batches_it_is_swept_what_travels_in_which(
    given: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["--gpus", "0", "0", "--micro-batches", "8", "--channels", "1", *given]
    monkeypatch.setattr(sys, "argv", ["sharded.py", *told, "--allow", "bfloat16"])
    exact, narrow = sharded.swept(12, sharded.arguments())
    assert len({arm["name"] for arm in exact}) == len(exact) == count
    assert [arm["configuration"]["kept_units"] for arm in narrow] == [0, 12]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--only-allowed"], "--only-allowed is for tunings, and needs --allow"),
        (["--only-allowed", "--allow", "quantized", "--by-hand"], "--only-allowed is for tunings"),
        (["--profile"], "--profile needs --gpus"),
        (["--profile", "--gpus", "0", "0", "--memory-tunings", "2"], "--profile needs --gpus"),
        (["--copies", "2"], "at least two"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    given: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sharded.py", *given])
    with pytest.raises(SystemExit):
        sharded.arguments()
    assert told in capsys.readouterr().err


def test_what_the_default_costs_is_measured_beside_torch(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/sharded.py", "--models", "gpt2-tiny", "--overhead"]
    command += ["--rounds", "1", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpt2-tiny-unshaped.json").read_text())
    assert set(result["run_off"]["arms"]) == {sharded.STOCK, sharded.OFF, sharded.DEFAULT}
    assert sharded.DEFAULT in done.stdout


def setting(kept: int) -> dict[str, Any]:
    return {"kept_units": kept, "channels": 1}


SWEPT = [
    {"configuration": setting(kept), "seconds": 1 - kept / 10, "peak_bytes": 100 + 10 * kept}
    for kept in (0, 2, 4)
]


@pytest.mark.parametrize(
    ("limit", "kept", "is_found", "is_over"),
    [(125, 2, True, False), (125, 0, False, False), (125, 4, False, True), (145, 4, True, False)],
)
def test_the_best_that_fits_is_that_of_the_sweep(
    limit: int, kept: int, is_found: bool, is_over: bool
) -> None:
    tuning = {"allowed_bytes": limit / 0.9, "configuration": setting(kept)}
    (found,) = sharded.judged({"swept": SWEPT, "tunings": [tuning]})
    assert (found["is_found"], found["is_over"]) == (is_found, is_over)
    assert found["best"] == setting(2 if limit == 125 else 4)
