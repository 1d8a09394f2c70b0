"""The job with Megatron's arguments, and what is counted of its runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from bagua_runs.outcomes import Outcome
from benchmarks import system
from benchmarks.system import Bench, Counts
from tests import torchrun

pytestmark = pytest.mark.slow

SMALL = ["--num-layers", "4", "--layer-parameters", "1000"]


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "LAUNCHER", torchrun.COMMAND)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    "changes",
    [
        {"--ddp-bucket-size": "1500"},
        {"--overlap-grad-reduce": "on", "--overlap-param-gather": "on", "--kept-layers": "2"},
    ],
)
def test_the_job_trains_with_its_arguments(changes: dict[str, str]) -> None:
    outcome = Bench(SMALL, 5, 0).run(changes)
    assert outcome.score is not None, outcome


def test_what_does_not_go_together_is_refused_and_not_in_the_grid() -> None:
    bench = Bench(SMALL, 5, 0)
    outcome = bench.run({"--overlap-param-gather": "on"})
    assert outcome.failure == "ended with exit code 1"
    assert any("Must use --overlap-param-gather with" in line for line in outcome.last_lines)
    grid = [bench.space.changes(candidate) for candidate in bench.space.candidates]
    assert not any("--overlap-param-gather" in c and "--overlap-grad-reduce" not in c for c in grid)
    # Without the overlap five numbers of layers; with it also five sizes and the gathering or not.
    assert len(grid) == 5 + 5 * 5 * 2


def test_too_many_kept_layers_are_out_of_memory() -> None:
    outcome = Bench(["--kept-layers", "24"], 5, 0).run({})
    assert outcome.is_out_of_memory, outcome
    assert Counts.of([outcome, Outcome(1.0, 0.0), Outcome(failure="crashed")]) == Counts(1, 1)


def _run(self: Bench, changes: Mapping[str, str], timeout_seconds: float = 0.0) -> Outcome:
    """In place of a job: what one with these arguments may take."""
    seconds = 1.0 if "--overlap-grad-reduce" in changes else 1.5
    return Outcome(seconds, math.log(seconds), 0.01, seconds=timeout_seconds)


def test_a_round_ends_with_a_table_and_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "run", _run)
    path = tmp_path / "system.json"
    system.main(
        ["--only=--overlap-grad-reduce", "--steps", "5", "--pairs", "1", "--json", str(path)]
    )
    [result] = json.loads(path.read_text())
    assert result["combinations"] == 2
    assert result["search_runs"] <= 6
    assert result["grid_counts"] == {"out_of_memory": 0, "failed": 0}
    assert result["found"] == result["best"] == {"--overlap-grad-reduce": "on"}
    assert result["own_seconds"] == 1.5
    printed = capsys.readouterr().out
    assert "found over best" in printed
    assert f"in half its runs: {int(result['ratio'] <= 1.05)} of 1" in printed
