"""A search that is interrupted again and again, with real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagua_autotune.model.job import Trial
from bagua_autotune.store import Store
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("scored_job.py")
OPTIONS = [
    *("--metric", r"Total img/sec .*: ([0-9.]+)", "--backend", "gloo", "--runs", "12"),
    *("--set", "THREADS=1,2,4,8", "--set", "BUFFERS=1,4,8,16"),
]
RUN_SECONDS = 0.15


class Searches:
    """One search after the other of the same command, on one database.

    Args:
        folder: of all that they write.
        options: further ones.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.job_folder = folder / "job"
        self.job_folder.mkdir(parents=True)
        self.database = folder / "autotune.db"
        job = [sys.executable, "-S", str(JOB), str(self.job_folder), str(RUN_SECONDS)]
        self.command = [
            *(sys.executable, "-m", "bagua_autotune", "system", *OPTIONS, *options),
            *("--database", f"sqlite:///{self.database}", "--", *job),
        ]

    def noted(self, name: str) -> list[str]:
        """What the runs have noted."""
        path = self.job_folder / name
        return path.read_text().splitlines() if path.exists() else []

    def start(self) -> subprocess.Popen[str]:
        # Without the runs' folders: a search that is killed leaves one behind.
        folder = self.job_folder.parent / "tmp"
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            self.command, env={**os.environ, "TMPDIR": str(folder)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def interrupted(self, starts: int, number: signal.Signals, pause: float) -> tuple[int, str]:
        """Interrupt a search a while after so many of its runs have begun, or let it end.

        Returns:
            Its exit code, and what it wrote to both outputs.
        """
        most = len(self.noted("starts")) + starts
        process = self.start()
        wait_until(
            lambda: len(self.noted("starts")) >= most or process.poll() is not None, "a further run"
        )
        time.sleep(pause)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        return process.returncode, out + err

    def whole(self) -> tuple[str, str]:
        """Make it to its end, and return both outputs."""
        out, err = self.start().communicate(timeout=100)
        return out, err

    def is_finished(self) -> bool:
        """Whether the latest search has its result."""
        store = Store(f"sqlite:///{self.database}", as_found=True)
        try:
            return any(store.jobs.get(job.id).result for job in store.jobs.contacts())
        finally:
            store.close()

    def trials(self) -> list[list[Trial]]:
        """Those of each job, oldest first."""
        store = Store(f"sqlite:///{self.database}", as_found=True)
        try:
            return [store.trials.of(contact.id) for contact in reversed(store.jobs.contacts())]
        finally:
            store.close()


def same(trial: Trial) -> tuple[object, ...]:
    """All of a trial but its times."""
    told = trial.index, trial.purpose, trial.configuration, trial.state
    return (*told, trial.estimate, trial.failure)


def result_line(output: str) -> str:
    """The result in words, without how long it took."""
    lines = output.splitlines()
    return next(line.rpartition(", ")[0] for line in lines if "measured in turns" in line)


def test_a_search_killed_again_and_again_makes_no_run_twice(tmp_path: Path) -> None:
    undisturbed = Searches(tmp_path / "undisturbed")
    out, err = undisturbed.whole()
    assert out.splitlines() == ["export THREADS=4", "export BUFFERS=8"]
    (expected,) = undisturbed.trials()

    searches, drawn = Searches(tmp_path / "killed"), random.Random(9)
    interruptions, code, said = -1, -1, ""
    while code != 0:
        interruptions += 1
        assert interruptions < 60
        pause = drawn.uniform(0, 1.5 * RUN_SECONDS)
        code, said = searches.interrupted(drawn.choice((4, 6)), signal.SIGKILL, pause)
        if searches.is_finished():
            break  # killed, maybe, between the end of the search and its own
    assert interruptions >= 2
    (found,) = searches.trials()
    assert list(map(same, found)) == list(map(same, expected))
    if code == 0:
        assert result_line(said) == result_line(err)
        assert said.splitlines()[:2] == out.splitlines()
    # Only runs that were cut short are made again, at most one for each interruption. One that was
    # over just before it could be stored counts among them.
    repeated = len(searches.noted("starts")) - len(undisturbed.noted("starts"))
    assert 0 <= repeated <= interruptions
    assert "of an interrupted search taken over" in said


def test_what_was_over_is_not_made_again_and_a_finished_search_begins_anew(tmp_path: Path) -> None:
    searches = Searches(tmp_path)
    code, said = searches.interrupted(4, signal.SIGINT, 0)
    assert code == 130
    assert "the same command goes on" in said
    (cut,) = searches.trials()
    assert [trial.state for trial in cut] == ["measured"] * 3 + ["running"]
    begun = len(searches.noted("starts"))
    _, err = searches.whole()
    assert err.startswith("3 runs of an interrupted search taken over")
    assert "run  3" not in err
    assert "run  4" in err
    (first,) = searches.trials()
    assert len(searches.noted("starts")) - begun == len(first) - 3
    _, err = searches.whole()
    assert "taken over" not in err
    assert [len(trials) for trials in searches.trials()] == [len(first)] * 2


def test_another_seed_is_another_search(tmp_path: Path) -> None:
    searches = Searches(tmp_path)
    searches.interrupted(3, signal.SIGINT, 0)
    searches.command[4:4] = ["--seed", "1"]
    assert "taken over" not in searches.whole()[1]
    assert len(searches.trials()) == 2


def test_two_searches_at_the_same_time_do_not_write_one_job(tmp_path: Path) -> None:
    searches = Searches(tmp_path)
    first = searches.start()
    wait_until(lambda: bool(searches.noted("starts")), "the first run")
    os.kill(first.pid, signal.SIGSTOP)  # it runs until the other has ended
    _, said = searches.whole()
    os.kill(first.pid, signal.SIGCONT)
    _, err = first.communicate(timeout=100)
    assert said.startswith("another search with this command runs: this one begins anew")
    assert "another search" not in err
    one, other = searches.trials()
    assert list(map(same, one)) == list(map(same, other))


def test_a_database_that_cannot_be_used_is_said_and_the_search_goes_on(tmp_path: Path) -> None:
    searches = Searches(tmp_path)
    searches.database.write_text("this is no database\n" * 100)
    out, err = searches.whole()
    assert out.splitlines() == ["export THREADS=4", "export BUFFERS=8"]
    assert err.startswith("the search goes on, but is not stored: the database")
