"""The calibration, on cells whose network is simulated: what must come out is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import calibration
import pytest

from bagua_simulator import Simulator
from bagua_simulator.summary import summarise
from tests.simulator.jobs import MIB, make_cluster, make_workload

SIZES = (MIB // 2, 4 * MIB, 16 * MIB, 64 * MIB)
WAYS = ("off", "leaders", "shards")
CLUSTER = replace(
    make_cluster(nodes=2, bandwidth=1.25e8, latency_seconds=2e-4),
    inside_bandwidth_bytes_per_second=1e9,
)
# Sleeping: communicating costs computing nothing.
TRUTH = Simulator(
    make_workload([MIB // 8, MIB // 2] * 15, milliseconds=8.0), CLUSTER, 0.0, launch_seconds=0.0
)
TRIALS = [
    {"bucket_bytes": 25 * MIB, "hierarchical": "off", "channels": 1},
    {"bucket_bytes": 2 * MIB, "hierarchical": "leaders", "channels": 2},
    {"bucket_bytes": 8 * MIB, "hierarchical": "shards", "channels": 1},
    {"bucket_bytes": MIB, "hierarchical": "leaders", "channels": 1},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As gain.py writes it: one cell, and one without a profile."""
    steps = [(knobs, TRUTH.profile(knobs, number)) for number, knobs in enumerate(TRIALS)]
    record = summarise("cell", (2, 2), TRUTH.workload.tensors, steps)
    (tmp_path / "made-up").mkdir()
    (tmp_path / "made-up" / "profile.json").write_text(record.model_dump_json())
    arms = {
        f"{way} {size}": {
            "name": f"{way} {size}",
            "kind": "ours",
            "configuration": {"bucket_bytes": size, "hierarchical": way, "buckets": []},
        }
        for way in WAYS
        for size in SIZES
    }
    seconds = {name: TRUTH.step_seconds(_knobs(arm)) for name, arm in arms.items()}
    # One disturbed step does not change a median.
    blocks = {name: [[value, value], [3 * value]] for name, value in seconds.items()}
    other = {"stock default": {"name": "stock default", "kind": "stock", "bucket_mib": None}}
    result = {
        "cell": {"name": "made-up", "network": "1gbit"},
        "fallback": None,
        "arms": {**other, **arms},
        "sweep": {"arms": {**blocks, "stock default": [[1.0]]}},
    }
    (tmp_path / "made-up.json").write_text(json.dumps(result))
    bare = {**result, "cell": {"name": "bare", "network": "1gbit"}}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    (tmp_path / "gain.json").write_text(json.dumps({"goals": [], "cells": []}))
    return tmp_path


def _knobs(arm: dict) -> dict:
    return {k: v for k, v in arm["configuration"].items() if k != "buckets"}


def test_a_cell_is_foretold_from_its_profile(folder, capsys):
    (cell,) = calibration.calibrate_folder(folder)
    assert len(cell.arms) == len(SIZES) * len(WAYS)
    assert max(cell.errors) < 0.05
    assert cell.excess < 0.01
    assert cell.contention < 0.05
    assert "bare: left out" in capsys.readouterr().err


def test_errors_and_losses_are_those_of_the_sweep(folder):
    (cell,) = calibration.calibrate_folder(folder)
    arms = tuple(
        calibration.Arm(name, way, measured, predicted)
        for name, way, measured, predicted in (
            ("a", "flat", 1.0, 1.1),
            ("b", "shards", 1.25, 1.0),
            ("c", "flat", 2.0, 2.0),
        )
    )
    found = calibration.document([replace(cell, arms=arms)])
    assert found["median_error"] == pytest.approx(0.1)
    assert found["worst_error"] == pytest.approx(0.2)
    assert found["cells"][0]["best"] == "a"
    assert found["cells"][0]["foretold"] == "b"
    assert found["ways"]["flat"] == pytest.approx({"median_error": 0.05, "worst_error": 0.1})
    assert found["ways"]["shards"] == pytest.approx({"median_error": 0.2, "worst_error": 0.2})
    assert found["worst_excess"] == found["cells"][0]["excess"] == pytest.approx(0.25)


def test_a_goal_that_is_missed_is_said(folder, capsys):
    (cell,) = calibration.calibrate_folder(folder)
    calibration.show([cell])
    assert capsys.readouterr().out.count(": met") == 2
    calibration.show([replace(cell, arms=(calibration.Arm("a", "flat", 1.0, 1.2),))])
    out = capsys.readouterr().out
    assert "median error at most 10%: 20.0%: MISSED" in out
    assert "worst cell at most 3%: 0.0%: met" in out


def test_errors_are_shown_by_way_of_reducing_too(folder, capsys):
    calibration.show(calibration.calibrate_folder(folder))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    ways = lines[lines.index(["way", "of", "reducing", "median", "error", "worst"]) + 1 :][:3]
    assert [line[0] for line in ways] == ["flat", "leaders", "shards"]
    assert all(word.endswith("%") for line in ways for word in line[1:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fallback": "no right to make namespaces"}, "over loopback: no right to make namespaces"),
        ({"sweep": {"arms": {}}}, "no arm of its sweep was measured"),
    ],
)
def test_a_cell_that_says_nothing_of_its_network_is_left_out(folder, capsys, change, reason):
    path = folder / "made-up.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert calibration.calibrate_folder(folder) == []
    assert reason in capsys.readouterr().err
