"""The bench goes on after a cell that failed, resumes, and reports what is there."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gain
from benchmarks.support.cells.cell import FULL, Cell, Effort
from benchmarks.support.cells.jobs import CellError
from benchmarks.support.cells.run import run_cell
from benchmarks.support.cells.selection import finalists
from benchmarks.support.harness import Spread, ratio, spread
from benchmarks.testbed import tools
from tests.benchmarks.gain.made_up import GOOD, MIB, made_up_cell

pytestmark = pytest.mark.slow


def options(*argv: str) -> argparse.Namespace:
    return gain.arguments(argv)


def write_made_up(cell: Cell, effort: Effort, output: Path, loopback: bool = False) -> Path:
    if cell.model == "vgg16":
        raise CellError("tune.py ended with exit code 1")
    path = output / f"{cell.name}.json"
    path.write_text(json.dumps(made_up_cell(cell, GOOD)))
    return path


CELLS = [Cell("resnet50", "1gbit"), Cell("vgg16", "1gbit"), Cell("bert-base", "1gbit")]


def test_a_cell_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gain, "run_cell", write_made_up)
    earlier = tmp_path / "vgg16-1gbit-2x2.json"
    earlier.write_text(json.dumps(made_up_cell(CELLS[1], GOOD)))
    command = ["gain.py", "--networks", "1gbit", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        gain.main()
    assert ended.value.code == 1
    printed = capsys.readouterr()
    assert "[2/3] vgg16-1gbit-2x2: FAILED: tune.py ended with exit code 1" in printed.err
    assert "1 of 3 cells failed: vgg16-1gbit-2x2" in printed.err
    assert "bert-base-1gbit-2x2" in printed.out
    written = json.loads((tmp_path / "gain.json").read_text())
    assert [cell["cell"]["model"] for cell in written["cells"]] == ["resnet50", "bert-base"]
    assert written["goals"][0]["is_met"] is True
    assert written["failures"] == {"vgg16-1gbit-2x2": "tune.py ended with exit code 1"}
    assert earlier.exists()


def test_resuming_runs_only_what_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(cell: Cell, effort: Effort, output: Path, loopback: bool) -> Path:
        ran.append(cell.model)
        return write_made_up(cell, effort, output)

    monkeypatch.setattr(gain, "run_cell", run)
    assert gain.run_all(CELLS, FULL, tmp_path, resume=False) == {
        "vgg16-1gbit-2x2": "tune.py ended with exit code 1"
    }
    ran.clear()
    gain.run_all(CELLS, FULL, tmp_path, resume=True)
    assert ran == ["vgg16"]
    ran.clear()
    gain.run_all(CELLS, FULL, tmp_path, resume=False)
    assert ran == ["resnet50", "vgg16", "bert-base"]


def test_a_cell_that_was_run_otherwise_is_not_done(tmp_path: Path) -> None:
    cell = CELLS[0]
    path = write_made_up(cell, FULL, tmp_path)
    assert gain.is_done(cell, FULL, tmp_path)
    assert not gain.is_done(replace(cell, gradient_bytes=1), FULL, tmp_path)
    assert not gain.is_done(cell, replace(FULL, sweep_rounds=5), tmp_path)
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "fallback": "no root"}))
    assert not gain.is_done(cell, FULL, tmp_path)
    assert gain.is_done(cell, FULL, tmp_path, loopback=True)
    path.write_text(path.read_text()[:100])
    assert not gain.is_done(cell, FULL, tmp_path)


def test_a_report_reads_every_cell_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell in CELLS[::2]:
        write_made_up(cell, FULL, tmp_path)
    (tmp_path / "odd.json").write_text('{"cell": {"model": "resnet50"}}')
    (tmp_path / "broken.json").write_text("{")
    given = options("--report", "--markdown", "--output", str(tmp_path))
    gain.summarise(given, gain.measured_in(tmp_path))
    printed = capsys.readouterr()
    assert "| resnet50-1gbit-2x2 | 500.2 ± " in printed.out
    assert "odd.json: left out" in printed.err
    assert "broken.json: left out" in printed.err
    assert not (tmp_path / "gain.json").exists()


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--models", "alexnet"], "no model alexnet"),
        (["--networks", "fast"], "fast"),
        (["--sweep-mib", "25", "50"], "10 MiB"),
        (["--sweep-channels", "2", "4"], "1 channel"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(argv: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        gain.chosen_cells(options(*argv))


def test_the_run_off_measures_all_that_the_sweep_cannot_tell_from_the_fastest() -> None:
    cell = made_up_cell(CELLS[0], {**GOOD, "tuned": 0.1, "stock 1 MiB": 0.1})
    arms = list(cell["arms"].values())
    times = {name: spread(blocks) for name, blocks in cell["sweep"]["arms"].items()}
    # Nearly all take 1.0 s.
    found = finalists(arms, times, FULL)
    assert len(found) == FULL.most_finalists
    assert all(name.startswith(("leaders", "shards")) for name in found)
    for number, name in enumerate(found[3:]):
        times[name] = Spread(1.1, 0.01, 0.99 if number == 0 else 1.05, 1.2, 6)
    clear = {name: Spread(2.0, 0.01, 1.9, 2.1, 6) for name in times if name not in found}
    assert set(finalists(arms, {**times, **clear}, FULL)) == set(found[:4])


def test_noise_that_lasts_a_round_cancels_in_pairs() -> None:
    noisy = [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]
    faster = [[seconds * 0.9 for seconds in block] for block in noisy]
    found = ratio(noisy, faster)
    assert (found.paired_ratio, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))
    alone = spread(noisy)
    assert alone.low < alone.seconds < alone.high


def test_without_hosts_of_its_own_a_cell_is_not_measured_unless_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")  # no tool that makes hosts
    monkeypatch.setattr(tools, "SYSTEM_FOLDERS", "")
    earlier = tmp_path / "resnet50-1gbit-2x2.json"
    earlier.write_text("an earlier one's")
    with pytest.raises(CellError, match="--loopback measures it all the same"):
        run_cell(CELLS[0], FULL, tmp_path)
    assert earlier.read_text() == "an earlier one's"


@pytest.mark.parametrize(
    "otherwise",
    [
        Cell("resnet50", "1gbit", gradient_bytes=100_000_000),
        Cell("resnet50", "1gbit", compute_seconds=0.5),
        Cell("resnet50", "1gbit", device="cuda"),
        Cell("resnet50", "1gbit", smoke=True),
    ],
)
def test_cells_that_differ_have_files_of_their_own(otherwise: Cell) -> None:
    assert otherwise.name != CELLS[0].name == "resnet50-1gbit-2x2"


def test_by_default_there_are_12_cells() -> None:
    cells, effort = gain.chosen_cells(options())
    assert len({cell.name for cell in cells}) == 12
    assert len(effort.sizes_bytes) >= 8
    assert {1 * MIB, 5 * MIB, 10 * MIB, 25 * MIB} < {*effort.sizes_bytes}


def test_cells_are_repeated_under_names_of_their_own() -> None:
    given = options("--models", "gpt2-small", "--networks", "300mbit", "--repeat", "2")
    cells, _ = gain.chosen_cells(given)
    assert [cell.name for cell in cells] == [
        "gpt2-small-300mbit-2x2",
        "gpt2-small-300mbit-2x2-run2",
    ]


def test_an_arm_that_was_never_measured_is_an_error() -> None:
    with pytest.raises(ValueError):
        spread([[], []])
