"""The bench goes on after a cell that failed, resumes, and reports what is there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gain
import pytest
from cells.arms import SMOKE, Effort
from cells.cell import Cell
from cells.run import CellError, best_of
from cells.spread import ratio, spread

from tests.benchmarks.gain.made_up import GOOD, MIB, made_up_cell


def options(*argv: str) -> argparse.Namespace:
    return gain.arguments(argv)


def write_made_up(cell: Cell, effort: Effort, output: Path) -> Path:
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


def test_resuming_runs_only_what_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(cell: Cell, effort: Effort, output: Path) -> Path:
        ran.append(cell.model)
        return write_made_up(cell, effort, output)

    monkeypatch.setattr(gain, "run_cell", run)
    assert gain.run_all(CELLS, SMOKE, tmp_path, resume=False) == {
        "vgg16-1gbit-2x2": "tune.py ended with exit code 1"
    }
    ran.clear()
    gain.run_all(CELLS, SMOKE, tmp_path, resume=True)
    assert ran == ["vgg16"]
    ran.clear()
    gain.run_all(CELLS, SMOKE, tmp_path, resume=False)
    assert ran == ["resnet50", "vgg16", "bert-base"]


def test_a_cell_that_is_asked_for_otherwise_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_made_up(CELLS[0], SMOKE, tmp_path)
    monkeypatch.setattr(gain, "run_cell", write_made_up)
    larger = Cell("resnet50", "1gbit", gradient_bytes=100_000_000)
    gain.run_all([larger], SMOKE, tmp_path, resume=True)
    assert gain.results_in(tmp_path)[0]["cell"]["gradient_bytes"] == 100_000_000


def test_a_smoke_cell_is_never_taken_for_a_real_one() -> None:
    (smoke,), _ = gain.chosen_cells(options("--smoke"))
    assert smoke.name not in {cell.name for cell in gain.chosen_cells(options())[0]}


def test_a_failed_cell_leaves_no_figures_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vgg16-1gbit-2x2.json").write_text(json.dumps(made_up_cell(CELLS[1], GOOD)))
    monkeypatch.setattr(gain, "run_cell", write_made_up)
    gain.run_all(CELLS[1:2], SMOKE, tmp_path, resume=False)
    assert gain.results_in(tmp_path) == []


def test_a_report_reads_every_cell_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for cell in CELLS[::2]:
        write_made_up(cell, SMOKE, tmp_path)
    given = options("--report", "--markdown", "--output", str(tmp_path))
    gain.summarise(given, gain.results_in(tmp_path))
    printed = capsys.readouterr().out
    assert "| resnet50-1gbit-2x2 | 500.2 ± " in printed
    assert "no cell has a profile" in printed
    assert not (tmp_path / "gain.json").exists()


def test_by_default_there_are_12_cells_and_baguas_tuning_in_three() -> None:
    cells, effort = gain.chosen_cells(options())
    assert len({cell.name for cell in cells}) == 12
    assert sum(cell.bagua for cell in cells) == 3
    assert len(effort.sizes_bytes) >= 8
    assert {1 * MIB, 5 * MIB, 10 * MIB, 25 * MIB} < {*effort.sizes_bytes}


def test_cells_are_repeated_under_names_of_their_own() -> None:
    given = options("--models", "gpt2-small", "--networks", "300mbit", "--repeat", "2")
    cells, _ = gain.chosen_cells(given)
    assert [cell.name for cell in cells] == [
        "gpt2-small-300mbit-2x2",
        "gpt2-small-300mbit-2x2-run2",
    ]


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--models", "alexnet"], "no model alexnet"),
        (["--networks", "fast"], "fast"),
        (["--models", "vgg16", "--bagua", "resnet50/1gbit"], "--bagua resnet50/1gbit"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(argv: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        gain.chosen_cells(options(*argv))


def test_the_fastest_of_the_sweep_leave_out_stock_and_tuned() -> None:
    cell = made_up_cell(CELLS[0], {**GOOD, "tuned": 0.1, "stock 1 MiB": 0.1})
    best = best_of(cell["sweep"], list(cell["arms"].values()), 1)
    assert best[0].startswith(("leaders", "shards"))


def test_noise_that_lasts_a_round_cancels_in_pairs() -> None:
    noisy = [[1.0, 1.0], [3.0, 3.0], [1.0, 1.0], [2.0, 2.0]]
    faster = [[seconds * 0.9 for seconds in block] for block in noisy]
    found = ratio(noisy, faster)
    assert (found.paired_ratio, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))
    alone = spread(noisy)
    assert alone.low < alone.seconds < alone.high


def test_an_arm_that_was_never_measured_is_an_error() -> None:
    with pytest.raises(ValueError):
        spread([[], []])
