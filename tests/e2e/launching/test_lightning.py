"""Whole trainings whose ranks Lightning starts: tuned to the end, interrupted, failing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import LIMITS
from tests.integrations.arms import needs
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, needs("lightning")]

ROOT = Path(__file__).parents[3]
END_SECONDS = 30
"""A training that is told to end has gone by then; some 5 s, on a machine that is not busy."""

Start = Callable[..., "Job"]


class Job:
    """A training in a session of its own, with what it prints in a file."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        self._output = folder / "output.txt"
        command = [sys.executable, "-m", "tests.integrations.trainings.lightning_job", str(folder)]
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("BAGUA_")}
        self._process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            stdout=self._output.open("w"),
            stderr=subprocess.STDOUT,
            env={**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables},
            start_new_session=True,
        )
        self.started: list[psutil.Process] = []

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str, seconds: float = 240) -> None:
        wait_until(lambda: text in self.output or not self.is_running, text, seconds)
        assert text in self.output, self.output
        main = psutil.Process(self._process.pid)
        self.started = [main, *main.children(recursive=True)]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> int:
        """The exit code, once nothing of it is left."""
        code = self._process.wait(END_SECONDS)
        _, left = psutil.wait_procs(self.started, END_SECONDS)
        assert left == [], self.output
        return code

    def kill(self) -> None:
        for process in [psutil.Process(self._process.pid)] if self.is_running else []:
            self.started += [process, *process.children(recursive=True)]
        for process in self.started:
            if process.is_running():
                process.kill()
        self._process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs = []

    def make(*arguments: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path, *arguments, **variables))
        return jobs[-1]

    yield make
    for job in jobs:
        job.kill()


def test_a_training_is_tuned_and_ends_when_it_is_interrupted(start: Start, tmp_path: Path) -> None:
    data = {"XDG_DATA_HOME": str(tmp_path / "data")}
    job = start(**LIMITS, **data)
    job.wait_for("autotune: job lightning_job-Slow is being tuned")
    job.wait_for("; cost ")  # In the line with the result.
    assert any("bagua_autotune" in process.cmdline() for process in job.started)
    job.interrupt()
    assert job.end() != 0
    assert "Traceback" not in job.output


def test_a_failure_on_one_rank_ends_all(start: Start) -> None:
    job = start("--strategy", "bagua_async", "--failing")
    job.wait_for("rank 1 fails")
    assert job.end() != 0
    assert "this is the failure" in job.output


def test_the_example_trains_logs_and_saves(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "lightning_digits.py")]
    command += ["--strategy", "bagua_bytegrad", "--accelerator", "cpu", "--epochs", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"test accuracy ([0-9.]+)%, epoch 2", done.stdout)
    assert float(accuracy) > 60
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "validation_accuracy" in metrics.read_text()
    assert list(tmp_path.rglob("last.ckpt"))
