"""The bench goes on after a cell that failed, and reports what is there; what is measured in cells
on GPUs, and what that is compared with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bagua_client import Configuration
from benchmarks import gain
from benchmarks.support.cells.cell import (
    COMPRESSED,
    FULL,
    ON_GPUS,
    SMOKE,
    Cell,
    Effort,
    finalists,
    is_swept,
    sweep_arms,
)
from benchmarks.support.cells.figures import Figures, figures_of, goals
from benchmarks.support.cells.report import show
from benchmarks.support.cells.run import CellError, run_cell
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


def test_cells_are_repeated_under_names_of_their_own() -> None:
    given = options("--models", "gpt2-small", "--networks", "300mbit", "--repeat", "2")
    cells, _ = gain.chosen_cells(given)
    assert [cell.name for cell in cells] == [
        "gpt2-small-300mbit-2x2",
        "gpt2-small-300mbit-2x2-run2",
    ]


TUNED = Configuration(25 * MIB, channels=8)
TIMES = {"stock default": 3.4, "stock 100 MiB": 3.0, "flat 25 MiB, 8 channels": 0.97}
TIMES |= {"stock 5 MiB": 3.6, "stock 10 MiB": 3.5, "stock 50 MiB": 3.2}
TIMES |= {COMPRESSED: 2.0, "tuned, 16 bits allowed": 0.6, "flat 10 MiB": 3.3}


def gpu_cell(model: str = "vgg16", network: str = "unshaped", **fields: Any) -> Cell:
    return Cell(model, network, ranks_per_node=1, device="cuda", **fields)


def figures(
    times: Mapping[str, float] = TIMES, cell: Cell | None = None, **changes: Any
) -> Figures:
    changes = {"allow": "bfloat16", **changes}
    return figures_of(made_up_cell(cell or gpu_cell(), times, TUNED, **changes))


def test_the_sweep_has_channels_and_the_run_off_all_that_is_compared() -> None:
    swept = [arm for arm in sweep_arms(gpu_cell(), ON_GPUS) if is_swept(arm)]
    assert len({arm["name"] for arm in swept}) == 24
    assert {arm["configuration"]["channels"] for arm in swept} == {1, 2, 4, 8}
    found = figures()
    assert {COMPRESSED, "tuned, 16 bits allowed", "stock 100 MiB"} <= set(found.run_off)
    assert found.best == "flat 25 MiB, 8 channels"
    # Of one channel, as the default is.
    assert found.over_scaled_bagua_default.over == "flat 10 MiB"


def test_where_one_connection_gets_a_share_channels_are_swept_on_processors_too() -> None:
    plain = sweep_arms(Cell("vgg16", "1gbit"), FULL)
    shared = sweep_arms(Cell("vgg16", "1gbit-flow200mbit"), FULL)
    more = [arm for arm in shared if arm not in plain]
    assert {arm["configuration"]["channels"] for arm in more} == {2, 4}
    assert len({arm["name"] for arm in shared}) == len(shared) == len(plain) + 12


def test_the_tables_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = [figures(), figures(cell=gpu_cell("bert-base"), allow="")]
    show(found, goals(found), as_markdown=True)
    printed = capsys.readouterr().out
    assert "bucket 25 MiB, bf16 on the wire (changes the numbers) | 160 |" in printed
    for table in printed.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1


def test_what_is_asked_for_on_the_command_line() -> None:
    words = "--device cuda --nodes 2 --ranks-per-node 1 --models vgg16 gpt2 --networks 25gbit"
    words += " --allow bfloat16 --run-off-rounds 3 --sweep-steps 1"
    cells, effort = gain.chosen_cells(gain.arguments(words.split()))
    assert [cell.name for cell in cells] == ["vgg16-25gbit-2x1-cuda", "gpt2-small-25gbit-2x1-cuda"]
    assert effort.allow == "bfloat16"
    assert (effort.sizes_bytes, effort.run_off_rounds) == (ON_GPUS.sizes_bytes, 3)
    assert (effort.sweep_rounds, effort.sweep_steps) == (1, 1)
    assert gain.chosen_cells(gain.arguments([]))[1] == FULL
    assert gain.chosen_cells(gain.arguments(["--smoke"]))[1] == SMOKE
