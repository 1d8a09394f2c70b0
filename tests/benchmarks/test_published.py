"""The comparison with what Bagua's authors published."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.support.published import BERT_LARGE, BESIDE, FIGURES, VGG16, Figure

pytestmark = pytest.mark.slow

ROWS = {figure.name: figure.rows() for figure in FIGURES}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_what_is_fitted_is_met_and_all_else_is_a_prediction(figure: Figure) -> None:
    rows = ROWS[figure.name]
    given = [row for row in rows if row.is_given]
    assert [(row.way, row.gbit) for row in given] == [
        ("async", min(figure.steps)), ("async", max(figure.steps)),
    ]  # fmt: skip
    for row in given:
        assert row.simulated == pytest.approx(row.published, rel=0.01)
    # One row for each published step but the base's, and one more where a cause is tried.
    published_steps = sum(len(steps) - 1 for steps in figure.steps.values())
    assert len([row for row in rows if not row.is_cause]) == published_steps
    assert {row.way for row in rows if row.is_cause} == {BESIDE}


def test_a_step_shorter_than_its_bytes_need_is_marked() -> None:
    """By hand: 260 MB of ByteGrad at 10 Gbit/s take 208 ms, as long as the published step, of which
    the forward pass sends nothing; all-reduced weights have the whole step, and more than they
    need.
    """
    slow = {row.way: row for row in ROWS[VGG16.name] if row.gbit == 10}
    assert VGG16.steps[10]["bytegrad"] == pytest.approx(259.9e6 / 1.25e9, rel=0.01)
    assert slow["bytegrad"].is_too_fast
    assert not slow["decentralized"].is_too_fast
    assert not any(row.is_too_fast for row in ROWS[VGG16.name] if row.gbit == 100)
    assert not any(row.is_too_fast for row in ROWS[BERT_LARGE.name] if row.gbit == 64)


def test_it_prints_and_writes_every_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "published.json"
    monkeypatch.setattr(sys, "argv", ["published.py", "--json", str(path)])
    monkeypatch.setenv("COLUMNS", "200")
    published.main()
    printed = capsys.readouterr().out
    found = json.loads(path.read_text())["figures"]
    assert [len(figure["rows"]) for figure in found] == [len(rows) for rows in ROWS.values()]
    for figure in found:
        assert figure["source"] in printed
        for row in figure["rows"]:
            assert row["deviation"] == pytest.approx(row["simulated"] / row["published"] - 1)
            assert f"{row['published']:.2f}x" in printed


def test_the_documented_table_is_what_the_command_prints() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulating.md").read_text()
    for rows in ROWS.values():
        for row in rows:
            if not (row.is_cause or row.is_given):
                cells = [cell.strip() for cell in _line(page, row.gbit, row.way).split("|")]
                assert cells[3].split()[0] == f"{row.published:.2f}x"
                assert cells[3].endswith("*") == row.is_too_fast
                assert cells[4] == f"{row.simulated:.2f}x"
    predictions = [r for rows in ROWS.values() for r in rows if not (r.is_cause or r.is_given)]
    within = [row for row in predictions if abs(row.deviation) <= 0.15]
    assert (len(within), len(predictions)) == (13, 29)
    assert "Thirteen of 29 predictions are within 15 %" in page


def _line(page: str, gbit: float, way: str) -> str:
    """The row of the page for an algorithm on a link."""
    name, _, rest = way.partition(",")
    begin = f"| {gbit:g} | `{name}`{',' + rest if rest else ''} |"
    (line,) = [line for line in page.splitlines() if line.startswith(begin)]
    return line
