"""``bagua-autotune system`` on trainings of two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bagua_autotune.store import Store
from bagua_autotune.views.overviews import Overviews
from bagua_runs.job import Job
from bagua_runs.outcomes import Metric, StepTimes
from tests import torchrun

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

TRAINING = Path(__file__).parent / "programs" / "system_job.py"
ENDLESS = "1000000"


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def command(*arguments: str) -> list[str]:
    return [*torchrun.COMMAND, str(TRAINING), *arguments]


def assert_nothing_is_left() -> None:
    found = psutil.process_iter(["cmdline"])
    left = [p for p in found if str(TRAINING) in (p.info["cmdline"] or [])]
    assert left == []


def test_the_fastest_is_found_by_the_steps_of_a_training_that_knows_nothing(
    tmp_path: Path,
) -> None:
    database = f"sqlite:///{tmp_path / 'autotune.db'}"
    options = ["--database", database, "--job", "trained", "--steps", "5", "--runs", "6"]
    options += ["--timeout", "200", "--set", "FAST=1", "--only", "FAST"]
    job = command(ENDLESS, "stock")
    done = subprocess.run(
        [sys.executable, "-m", "bagua_autotune", "system", *options, "--", *job],
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "export FAST=1\n", done.stderr
    assert "ms a step" in done.stderr
    assert "6 runs, 0 of them failed" in done.stderr
    store = Store(database, as_found=True)
    (overview,) = Overviews(store).job_list().jobs
    store.close()
    assert (overview.name, overview.protocol, overview.world_size) == ("trained", "runs", 2)
    assert overview.figures.speedup is not None
    assert overview.figures.payback_steps is not None
    before, after = overview.figures.baseline_seconds, overview.figures.incumbent_seconds
    assert before is not None
    assert after is not None
    assert before / after == pytest.approx(overview.figures.speedup)
    assert_nothing_is_left()


def test_our_client_is_known_and_begins_on_the_channels_that_are_tried() -> None:
    measure = StepTimes(10)
    outcome = Job(command("30"), measure, lambda: False)({"BAGUA_DEFAULT_CHANNELS": "2"}, 60)
    assert outcome.score is not None, outcome
    assert (measure.facts["backend"], measure.facts["has_client"]) == ("gloo", True)
    assert any("2 channels" in line for line in outcome.last_lines)


def test_a_training_that_is_too_short_is_told() -> None:
    outcome = Job(command("4", "stock"), StepTimes(10), lambda: False)({}, 60)
    assert outcome.failure == "ended after too few steps to measure"


def test_an_installations_own_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'both'")
    environment = {**os.environ, **StepTimes(10).environment(tmp_path)}
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    code = "import os, sys; print(os.environ['SEEN'], sys.meta_path[0].__class__.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "both AfterImport\n"


def test_a_number_in_the_output_is_the_speed_and_ends_an_endless_training() -> None:
    measure = Metric(re.compile(r"samples/s: ([0-9.]+)"), most_matches=2)
    outcome = Job(command(ENDLESS, "stock"), measure, lambda: False)({"FAST": "1"}, 60)
    assert outcome.score == 400.0, outcome
    assert (measure.facts["backend"], measure.facts["has_client"]) == ("gloo", False)
    assert_nothing_is_left()
