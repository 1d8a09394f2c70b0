"""A profile's predictions beside a cell that measured what the simulator says, and more."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bagua_autotune.model.knobs import Value
from bagua_simulator import Simulator
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import load_record
from bagua_simulator.measured.step_times import step_times_of
from benchmarks import predicted

pytestmark = pytest.mark.slow

PROFILE = Path(__file__).parents[1] / "simulator" / "recorded" / "vgg16_two_hosts.json"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    record = load_record(PROFILE)
    return record.simulator(replace(fit_record(record).cluster, ranks_per_node=2))


@pytest.fixture(scope="module")
def cell(simulator: Simulator) -> dict[str, Any]:
    """Steps of the sweep as predicted, and one arm of which the run-off's are twice as long."""
    four = {"bucket_bytes": 10 * MIB, "channels": 4, "hierarchical": "off", "buckets": [],
            "first_bucket_bytes": 0, "last_bucket_bytes": 0, "wire_precision": "as_is"}  # fmt: skip
    arms = {
        "stock default": {"kind": "stock", "bucket_mib": None},
        "flat 10 MiB, 4 channels": {"kind": "ours", "configuration": four},
        "compute": {"kind": "compute"},
        "tuned, 16 bits allowed": {
            "kind": "ours", "configuration": {**four, "wire_precision": "bf16"},
        },
    }  # fmt: skip
    knobs: dict[str, dict[str, Any]] = {
        "stock default": {"bucket_bytes": 25 * MIB, "first_bucket_bytes": MIB},
        "flat 10 MiB, 4 channels": {"bucket_bytes": 10 * MIB, "channels": 4},
    }
    seconds = {name: simulator.step_seconds(each) for name, each in knobs.items()}
    sent = {name: [1.25 * simulator.sent_bytes(each)] for name, each in knobs.items()}
    run_off = [[2 * seconds["stock default"]] * 2] * 2
    return {
        "cell": {"nodes": 2, "ranks_per_node": 2},
        "arms": arms,
        "sweep": {
            "arms": {name: [[each] * 2] for name, each in seconds.items()},
            "sent_bytes": sent,
        },
        "run_off": {"arms": {"stock default": run_off}, "sent_bytes": sent},
    }


def test_steps_of_both_stages_count_and_other_arms_do_not(
    simulator: Simulator, cell: dict[str, Any]
) -> None:
    stock, four = predicted.rows_of(simulator, cell)
    assert (stock.steps, stock.group, four.group) == (6, "flat, 1", "flat, 4")
    assert stock.deviation == pytest.approx(-0.5)
    assert four.deviation == pytest.approx(0.0)
    assert (stock.high_seconds, stock.low_seconds) == pytest.approx(
        (2 * stock.simulated_seconds, stock.simulated_seconds)
    )
    assert stock.sent_deviation == pytest.approx(-0.2)
    assert predicted.summary([stock, four])[-1] == "all: 1 of 2 within 10%, median -25%"


def test_of_a_job_its_trials_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    default: dict[str, Value] = {"bucket_bytes": 25 * MIB, "channels": 1, "hierarchical": "off"}
    times = step_times_of([(default, seconds) for seconds in (0.3, 0.1, 0.2)])
    job = load_record(PROFILE).model_copy(update={"ranks_per_node": (2, 2), "step_times": times})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    names = [str(PROFILE), str(tmp_path / "job.json"), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["predicted.py", *names])
    predicted.main()
    [row] = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (row["measured_seconds"], row["low_seconds"], row["steps"]) == (0.2, 0.1, 3)
    assert (row["group"], row["measured_sent_bytes"]) == ("flat, 1", None)
    out = capsys.readouterr().out
    assert "vgg16" in out
    assert "on 2 x 2" in out
    assert f"{row['simulated_seconds'] * 1e3:.1f}" in out, "no column is cut off"


def test_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"nodes of \[2, 1\] ranks"):
        predicted.shape_of({"ranks_per_node": [2, 1]})


def test_on_one_node_nothing_is_sent_over_a_link(
    simulator: Simulator, cell: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    none = {name: [0.0] for name in cell["sweep"]["arms"]}
    stages = {part: {**cell[part], "sent_bytes": none} for part in ("sweep", "run_off")}
    rows = predicted.rows_of(simulator, {**cell, **stages})
    assert [row.sent_deviation for row in rows] == [None, None]
    predicted.show(rows)
    assert "all: 1 of 2" in capsys.readouterr().out


def test_the_program_prints_the_table_and_writes_it(
    cell: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cell.json").write_text(json.dumps(cell))
    names = [str(PROFILE), str(tmp_path / "cell.json"), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["predicted.py", *names])
    predicted.main()
    assert "flat, 4: 1 of 1 within 10%" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["rows"]) == 2

    slower = _three_times_slower(tmp_path / "slower.json")
    monkeypatch.setattr(sys, "argv", ["predicted.py", *names, "--rates", str(slower)])
    predicted.main()
    again = json.loads((tmp_path / "found.json").read_text())
    other = fit_record(load_record(slower)).cluster
    assert again["cluster"]["flow_bytes_per_second"] == other.flow_bytes_per_second
    assert again["cluster"]["latency_seconds"] == found["cluster"]["latency_seconds"]
    assert again["rows"][0]["simulated_seconds"] > 2 * found["rows"][0]["simulated_seconds"]


def _three_times_slower(path: Path) -> Path:
    """The profile of a machine whose buckets travel for three times as long."""
    profile = json.loads(PROFILE.read_text())
    for traffic in profile["traffic"]:
        for bucket in traffic["buckets"]:
            bucket["started_seconds"] *= 3
            bucket["ended_seconds"] *= 3
    path.write_text(json.dumps(profile))
    return path
