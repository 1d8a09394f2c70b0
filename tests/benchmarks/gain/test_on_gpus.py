"""Cells on GPUs: what is measured in them, and what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
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
    is_swept,
    sweep_arms,
)
from benchmarks.support.cells.figures import Figures, figures_of
from benchmarks.support.cells.goals import goals
from benchmarks.support.cells.report import show
from tests.benchmarks.gain.made_up import MIB, made_up_cell

pytestmark = pytest.mark.slow

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


def test_what_is_measured_beside() -> None:
    beside = figures().beside
    assert beside.allowed is not None
    assert beside.allowed.over_stock.paired_ratio == pytest.approx(3.4 / 0.6, rel=0.01)
    assert beside.allowed.over_compressed is not None
    assert beside.allowed.over_compressed.paired_ratio == pytest.approx(2.0 / 0.6, rel=0.01)
    assert figures(allow="").beside.allowed is None


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
    assert [cell.name for cell in cells] == [
        "vgg16-25gbit-2x1-cuda",
        "gpt2-small-25gbit-2x1-cuda",
    ]
    assert effort.allow == "bfloat16"
    assert (effort.sizes_bytes, effort.run_off_rounds) == (ON_GPUS.sizes_bytes, 3)
    assert (effort.sweep_rounds, effort.sweep_steps) == (1, 1)
    assert gain.chosen_cells(gain.arguments([]))[1] == FULL
    assert gain.chosen_cells(gain.arguments(["--smoke"]))[1] == SMOKE


def test_goals_are_not_for_cells_on_gpus() -> None:
    on_processors = figures_of(made_up_cell(Cell("vgg16", "1gbit"), {}))
    assert goals([figures(), on_processors]) == goals([on_processors])
