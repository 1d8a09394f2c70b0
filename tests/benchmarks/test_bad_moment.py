"""The benchmark's bad moment: which jobs have it, and that only the first visit meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from benchmarks.support.noise.bad_moment import (
    BAD_FACTORS,
    BadMomentJob,
    Level,
    level_that_matters,
    slower,
)
from benchmarks.support.noise.figures import of_bad_moments
from benchmarks.support.noise.unseen import cases
from benchmarks.support.noise.weather import Climate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STILL = Climate("", inside=0.0)


def configuration(channels: int, bucket_bytes: int = 2**22) -> Configuration:
    return Configuration(bucket_bytes=bucket_bytes, hierarchical="off", channels=channels)


class Scripted:
    """A tuner that has every configuration run in turn, each after one report on the one before."""

    def __init__(self, configurations: list[Configuration]) -> None:
        self._configurations = configurations
        self._index = 0
        self.profiles: list[float] = []

    def register(self, *_: object) -> None:
        """The job begins."""

    def observe(self, _job: str, trial: int, *_: object) -> None:
        self._index += trial == self._index  # late steps are of a trial before

    def take_event(self, *_: object) -> None:
        """Switches are of no interest."""

    def take_profile(self, _job: str, _trial: int, profile: Any) -> None:
        self.profiles.append(profile.step_seconds)

    def open_trial(self, _job: str) -> Any:
        return SimpleNamespace(index=self._index)

    def status(self, _job: str) -> Any:
        return SimpleNamespace(
            trial=self.open_trial(""), configuration=self._configurations[self._index]
        )


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    """AlexNet on a link that one flow does not fill."""
    return next(case.simulator for case in cases() if case.name.startswith("alexnet/100Gbit-2x1"))


def test_a_level_matters_if_every_other_is_slower_by_5_percent() -> None:
    def level(times: Mapping[tuple[int, int], float]) -> Level | None:
        """By channels and bucket size."""
        return level_that_matters({configuration(*key): s for key, s in times.items()})

    found = level({(1, 1): 2.0, (8, 1): 1.5, (8, 2): 1.0, (4, 2): 1.25})
    assert found == Level("channels", 8, 0.25)
    assert level({(1, 1): 2.0, (8, 2): 1.0, (4, 2): 1.04}) is None
    # It is the default's: nothing has to be found.
    assert level({(8, 1): 2.0, (8, 2): 1.0, (4, 2): 1.1}) is None


def test_a_link_is_slowed_down_until_steps_take_the_factor_and_computing_stays(
    simulator: Simulator,
) -> None:
    chosen = configuration(8)
    slow = slower(simulator, chosen, 1.8)
    ratio = slow.step_seconds(chosen) / simulator.step_seconds(chosen)
    assert ratio == pytest.approx(1.8, rel=0.01)
    assert type(slow) is type(simulator)
    assert slow.workload is simulator.workload
    before, after = simulator.profile(chosen), slow.profile(chosen)
    assert max(after.ready_seconds) == pytest.approx(max(before.ready_seconds), rel=0.25)
    assert after.buckets[-1].ended_seconds > 1.5 * before.buckets[-1].ended_seconds


def test_only_the_first_visit_meets_the_bad_moment(simulator: Simulator) -> None:
    script = [configuration(channels) for channels in (1, 8, 4, 8, 1, 8, 8)]
    script[3] = configuration(8, 2**25)  # any configuration with the level
    tuner = Scripted(script)
    job = BadMomentJob.make(cast(Tuner, tuner), simulator, STILL, seed=3)
    job.level = Level("channels", 8, 0.1)
    ratios: dict[int, float] = {}
    while job.visits < 4:
        job.run(1)
        visited = job.now.step_seconds(job.configuration) / job.true_seconds(job.configuration)
        ratios.setdefault(len(job.switches), visited)
    low, high = BAD_FACTORS
    (first_at,) = (place for place, ratio in ratios.items() if ratio != 1)
    assert job.switches[first_at - 1].configuration == script[1]
    assert low * 0.99 <= ratios[first_at] <= high * 1.01
    # Profiled steps are as slow.
    fast = simulator.step_seconds(script[1])
    assert any(1.5 * fast < seconds < 3 * fast for seconds in tuner.profiles)


def test_figures_of_what_was_found() -> None:
    def row(regret: float, visits: int, level: str) -> dict[str, Any]:
        ended = {"kept": "winner", "steps": 100, "lost_steps": 1.0, "is_in_interval": True}
        found = {"regret": regret, "visits": visits, "has_level": regret < 0.05}
        return {"level": level, "is_slower": False, "control": None, **ended, **found}

    found = of_bad_moments([row(0.0, 2, "channels 8"), row(0.3, 1, "channels 4")])
    assert found["all of them"]["within 2 %"] == "50%"
    assert found["all of them"]["visited again"] == "50%"
    assert found["channels 4"]["ends at the level"] == "0.0%"


def test_a_checkout_beside_itself_differs_by_nothing(tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    options = ["--parts=bad moment", "--runs=1", "--draw=77", "--processes=1", "--control"]
    options += ["--beside", str(ROOT), "--json", str(written)]
    script = str(ROOT / "benchmarks" / "tuning.py")
    # More threads would take turns on cores that other tests use: minutes instead of one.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, script, *options], check=True, capture_output=True, env=one_thread
    )
    assert b"regret +0.0 %" in printed.stdout
    figures = json.loads(written.read_text())["figures"]
    for line in ("all of them", "without"):
        assert figures[f"bad moment: {line}"] == figures[f"bad moment: {line}, beside"]
