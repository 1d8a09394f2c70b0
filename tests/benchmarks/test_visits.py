"""What steps, visits and jobs differ by, as benchmarks/visits.py tells it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import visits
from benchmarks.visits import steadiness

pytestmark = pytest.mark.slow

ROOT = Path(visits.__file__).parents[1]


def test_a_setting_says_how_large_buckets_are_and_how_they_travel() -> None:
    arm = visits.setting("64:2:shards")
    assert arm["name"] == "64:2:shards"
    configuration = arm["configuration"]
    named = ("bucket_bytes", "channels", "hierarchical")
    assert [configuration[name] for name in named] == [64 * 2**20, 2, "shards"]
    assert visits.setting("25")["configuration"]["channels"] == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--settings", "25"], "one alone is never left"),
        (["--settings", "25", "25"], "each once"),
        (["--settings", "25", "25:4:round"], "--settings"),
        (["--under", "CUDA"], "--under"),
        (["--steps", "1"], "--steps must be 2 at least"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        visits.arguments(given)
    assert told in capsys.readouterr().err


def test_visits_that_differ_are_told_from_steps_that_differ() -> None:
    by_visit = steadiness([[[0.07] * 6, [0.12] * 6, [0.07] * 6, [0.12] * 6]])
    assert by_visit.inside == pytest.approx(0, abs=1e-9)
    assert by_visit.between > 0.2
    assert (by_visit.fastest_seconds, by_visit.slowest_seconds) == (0.07, 0.12)
    by_step = steadiness([[[0.07, 0.12] * 3, [0.12, 0.07] * 3]])
    assert by_step.between == pytest.approx(0, abs=1e-9)
    assert by_step.inside > 0.2
    assert by_step.neighbours < -0.5
    by_job = steadiness([[[0.07] * 6] * 2, [[0.14] * 6] * 2])
    assert by_job.jobs == pytest.approx(2)
    assert by_job.between == pytest.approx(0, abs=1e-9)


def test_each_kind_of_job_visits_each_setting_so_often(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/visits.py", "--settings", "1", "1:2"]
    command += ["--gradient-megabytes", "2", "--compute-seconds", "0.01", "--output", str(tmp_path)]
    command += ["--jobs", "1", "--visits", "2", "--steps", "3", "--under", "OMP_NUM_THREADS=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (file,) = tmp_path.glob("vgg16-*mb-*.json")
    found = json.loads(file.read_text())["visits"]
    assert set(found) == {"as it is", "OMP_NUM_THREADS=1"}
    for settings in found.values():
        assert set(settings) == {"1", "1:2"}
        for jobs in settings.values():
            assert [[len(visit) for visit in each] for each in jobs] == [[3, 3]]
    assert done.stdout.count("OMP_NUM_THREADS=1") == 2
