"""``watch``: a job that is driven step by step, on a real terminal and in a pipe."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bagua_autotune.model.job import SILENT_SECONDS, Event
from bagua_autotune.store import Store
from bagua_autotune.tuning.lost_jobs import Leases
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.cli.conftest import DrivenJob, run
from tests.autotune.cli.terminal import Terminal
from tests.autotune.server import ServeProcess
from tests.autotune.support import make_spec

pytestmark = pytest.mark.slow

NAME = "[b]d[/b]"
SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def test_on_a_terminal_a_job_is_followed_from_before_its_beginning_to_its_end(
    tmp_path: Path,
) -> None:
    database = tmp_path / "a.db"
    with ServeProcess(database) as service:
        port = service.url.rpartition(":")[2]
        with Terminal("watch", NAME, "--wait", "--url", service.url) as terminal:
            terminal.wait_for(r"waiting for job '\[b\]d\[/b\]'")
            job = DrivenJob(database, NAME)
            terminal.wait_for(r"job +\[b\]d\[/b\]  tuning.*1 of at most")
            job.run(until_trial=3)
            terminal.wait_for(r"4 of at most.*1\.1\dx \(.*[▁█]")
            service.stop()
            terminal.wait_for(r"cannot be read: .*trying again")
            with ServeProcess(database, "--port", port):
                job.run()
                terminal.wait_for(r"finished")
                assert terminal.exit_status() == 0
        job.close()
    assert "result: bucket 4 MiB, hierarchical: 1.2" in terminal.text.splitlines()[-1]
    assert terminal.raw.rindex(SHOW_CURSOR) > terminal.raw.rindex(HIDE_CURSOR)
    # A frame takes the place of the one before.
    assert terminal.raw.count("\x1b[1A") > 5


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    with Terminal("watch", "x", "--wait", "--database", f"sqlite:///{tmp_path / 'a.db'}") as one:
        one.wait_for("waiting for job 'x'")
        one.type("\x03")
        assert one.exit_status() == 130
    assert "Traceback" not in one.text
    assert one.raw.rindex(SHOW_CURSOR) > one.raw.rindex(HIDE_CURSOR)


def test_in_a_pipe_each_change_is_a_line_without_control_codes(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    job = DrivenJob(tmp_path / "a.db", NAME)
    command = [sys.executable, "-m", "bagua_autotune", "watch", "job", "--database", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # On a busy machine the job may seem silent meanwhile.
        told = (line for line in process.stdout if "last reported" not in line)
        first = next(told)
        job.run(until_trial=2)
        second = next(told)
        job.end()
        rest = [line.rstrip("\n") for line in told]
    job.close()
    assert process.returncode == 0
    assert first.startswith(f"{NAME}: Tuning: measuring the default, trial 1 of at most 60")
    assert first.endswith("; now bucket 25 MiB, flat\n")
    assert second.startswith(f"{NAME}: Tuning: ")
    assert ", trial 3 of at most 60" in second
    assert rest[-1] == f"job {NAME} ended before its tuning did"
    assert "\x1b" not in first + second + "".join(rest)


def test_in_a_pipe_a_job_whose_training_was_killed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = DrivenJob(tmp_path / "a.db")
    job.run(until_trial=2)
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    store.jobs.touch("job", time.time() - 8)
    looks = iter([lambda: None, lambda: None, job.end])
    monkeypatch.setattr(time, "sleep", lambda seconds: next(looks)())
    result = run("watch", "job", "--database", str(store.database))
    store.close()
    job.close()
    assert result.exit_code == 0
    state, silence, *rest = result.stdout.splitlines()
    assert state.startswith("digits: Tuning: ")
    assert re.fullmatch(r"digits: the job last reported \d+ s ago; still watching", silence)
    assert rest[-1] == "job digits ended before its tuning did"
    assert not any("last reported" in line for line in rest)


def test_a_lost_job_is_said_to_be(tmp_path: Path) -> None:
    job = DrivenJob(tmp_path / "a.db")
    job.run(until_trial=2)
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    store.jobs.touch("job", time.time() - SILENT_SECONDS - 1)
    Leases(store, time.time).look()
    said = {
        command: run(*command.split(), "--database", str(store.database))
        for command in ("watch job", "show job", "jobs")
    }
    store.close()
    job.close()
    assert [result.exit_code for result in said.values()] == [0, 0, 0]
    last = said["watch job"].stdout.splitlines()[-1]
    assert last == "job digits is lost: its training has stopped reporting"
    assert said["show job"].stdout.splitlines()[0] == "job digits (job): lost"
    assert "\tlost\t2\t" in said["jobs"].stdout


@pytest.fixture
def tuned(tmp_path: Path) -> str:
    """The database of a job that is tuned, and whose training has ended."""
    job = DrivenJob(tmp_path / "a.db")
    job.run()
    job.end()
    job.close()
    return f"sqlite:///{tmp_path / 'a.db'}"


def test_a_job_that_is_over_is_summed_up_at_once(tuned: str) -> None:
    result = run("watch", "digits", "--database", tuned)
    assert result.exit_code == 0
    shown, outcome = result.output.splitlines()
    assert shown.startswith("digits: ")
    assert outcome.startswith("result: bucket 4 MiB, hierarchical: 1.2")


def test_without_wait_a_job_that_is_not_there_is_an_error() -> None:
    for arguments in (["--url", "http://127.0.0.1:1"], ["--database", "sqlite:////none/a.db"]):
        result = run("watch", "x", *arguments)
        assert result.exit_code == 1
        assert "Error: " in result.output


def test_a_refusal_is_not_waited_for(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "a.db", BAGUA_AUTOTUNE_TOKEN="sesame") as service:
        result = run("watch", "x", "--wait", "--url", service.url)
    assert result.exit_code == 1
    assert "401" in result.output


def test_a_job_of_the_name_whose_training_has_ended_is_not_what_is_waited_for(
    tuned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", stop)
    options = ["--wait", "--database", tuned]
    by_name = run("watch", "digits", *options)
    assert (by_name.exit_code, by_name.output) == (130, "waiting for job 'digits'\n")
    # An id means that one job.
    by_id = run("watch", "job", *options)
    assert by_id.exit_code == 0
    assert "result: " in by_id.output


def test_who_watches_a_training_is_led_to_its_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    tuner = Tuner(Store(url))
    lives = {
        job_id: make_spec(name=NAME, run="night-shift", world_size=size, ranks_per_node=[size])
        for job_id, size in (("first", 4), ("second", 2))
    }
    tuner.register("first", lives["first"])
    looks = iter(
        [
            lambda: tuner.register("second", lives["second"]),
            lambda: tuner.take_event("second", Event("ended")),
        ]
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: next(looks)())
    result = run("watch", NAME, "--database", url)
    old = run("watch", "first", "--database", url)
    tuner.store.close()
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"job {NAME} ended before its tuning did"
    assert next(looks, None) is None
    assert old.stdout.splitlines()[-1] == f"job {NAME} ended before its tuning did"
