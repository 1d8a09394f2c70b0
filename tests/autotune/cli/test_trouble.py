"""What the commands say of a service or a database that is not as they expect it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import bagua_autotune
from bagua_autotune import __version__
from bagua_autotune.cli.reader import DatabaseReader
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.cli.conftest import JOB, CannedService, DrivenJob, run
from tests.autotune.support import make_spec

COMMANDS = [["jobs"], ["show", JOB], ["show", "digits"], ["export", JOB, "--json"], ["watch", JOB],
            ["watch", "digits", "--wait"]]  # fmt: skip


OVERVIEW = f"/jobs/{JOB}/overview"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a service answers of a job that is tuned, by path."""
    database = tmp_path_factory.mktemp("trouble") / "a.db"
    job = DrivenJob(database)
    job.run()
    job.close()
    reader = DatabaseReader(f"sqlite:///{database}")
    (listed,) = reader.jobs()
    return {
        "/openapi.json": {"info": {"version": "0.0.7"}},
        "/jobs": {"jobs": [listed.model_dump(mode="json")]},
        f"/jobs/{JOB}": reader.job(JOB).model_dump(mode="json"),
        OVERVIEW: reader.overview(JOB).model_dump(mode="json"),
        f"/jobs/{JOB}/trials": {
            "trials": [trial.model_dump(mode="json") for trial in reader.trials(JOB)]
        },
    }


@pytest.fixture
def earlier(answers: dict[str, Any]) -> Iterator[CannedService]:
    """A service without overviews, whose list has no figures."""
    listed = [{**job} for job in answers["/jobs"]["jobs"]]
    for job in listed:
        del job["figures"], job["headline"]
    with CannedService({**answers, "/jobs": {"jobs": listed}}) as service:
        del service.answers[OVERVIEW]
        yield service


def tuning(answers: dict[str, Any]) -> dict[str, Any]:
    """The overview while the job was being tuned."""
    overview = answers[OVERVIEW]
    return {**overview, "job": {**overview["job"], "state": "tuning"}}


Between = Callable[..., None]


@pytest.fixture
def between_looks(monkeypatch: pytest.MonkeyPatch) -> Between:
    """Has ``watch`` do these things, one whenever it would wait, and then ends it."""

    def use(*actions: Callable[[], Any]) -> None:
        left = iter(actions)

        def sleep(seconds: float) -> None:
            action = next(left, None)
            if action is None:
                raise KeyboardInterrupt
            action()

        monkeypatch.setattr(time, "sleep", sleep)

    return use


@pytest.mark.parametrize("command", COMMANDS)
def test_a_service_of_an_earlier_release_is_called_that(
    earlier: CannedService, command: list[str]
) -> None:
    result = run(*command, "--url", earlier.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"Error: the service at {earlier.url} is of another release than this command (its version "
        f"is 0.0.7, this one's {__version__}); use the same release of both\n"
    )


def test_one_that_became_another_release_ends_watching(
    answers: dict[str, Any], between_looks: Between
) -> None:
    with CannedService({**answers, OVERVIEW: tuning(answers)}) as service:
        between_looks(lambda: service.answers.pop(OVERVIEW))
        result = run("watch", JOB, "--url", service.url)
    assert result.exit_code == 1
    assert "of another release" in result.stderr


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_what_is_no_such_service_at_all_is_told_in_one_line(command: list[str]) -> None:
    with CannedService({"/jobs": ["something"], OVERVIEW: 7}) as service:
        result = run(*command, "--url", service.url)
        service.answers.clear()
        nothing = run(*command, "--url", service.url)
    assert (result.exit_code, nothing.exit_code) == (1, 1)
    release = f"is not a service of this command's release, {__version__}"
    assert result.stderr == f"Error: what answers at {service.url} {release}\n"
    assert nothing.stderr == result.stderr


def test_no_json_is_told_in_one_line() -> None:
    with CannedService({"/jobs": b"<html>"}) as service:
        result = run("jobs", "--url", service.url)
    assert result.stderr == f"Error: {service.url} cannot be read: its answer is not JSON\n"


@pytest.mark.parametrize("command", [["show", "digits"], ["export", "digits", "--csv"]])
def test_a_job_that_is_deleted_meanwhile_is_not_there(
    answers: dict[str, Any], command: list[str]
) -> None:
    listed = {path: answers[path] for path in ("/openapi.json", "/jobs")}
    found = {**listed, OVERVIEW: answers[OVERVIEW]}
    for left in [listed, found] if command[0] == "export" else [listed]:
        with CannedService(left) as service:
            result = run(*command, "--url", service.url)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "there is no job 'digits'" in result.stderr


@pytest.mark.parametrize(
    "command", [["show", JOB], ["show", "digits"], ["watch", JOB], ["export", JOB, "--csv"]]
)
def test_the_tensors_are_read_by_who_needs_them_only(
    answers: dict[str, Any], command: list[str]
) -> None:
    with CannedService(answers) as service:
        assert run(*command, "--url", service.url).exit_code == 0
        assert f"/jobs/{JOB}" not in service.asked


@pytest.mark.parametrize("command", COMMANDS[:-1])
def test_an_answer_that_is_cut_off_is_told_in_one_line(
    answers: dict[str, Any], command: list[str]
) -> None:
    with CannedService(answers, cut_off=True) as service:
        result = run(*command, "--url", service.url)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {service.url} cannot be read: IncompleteRead")
    assert result.stderr.count("\n") == 1


def test_watching_goes_on_after_an_answer_that_was_cut_off(
    answers: dict[str, Any], between_looks: Between
) -> None:
    with CannedService({**answers, OVERVIEW: tuning(answers)}) as service:

        def cut_off(is_cut_off: bool) -> None:
            service.answers, service.cut_off = answers, is_cut_off

        between_looks(lambda: cut_off(True), lambda: cut_off(False))
        result = run("watch", JOB, "--url", service.url)
    assert result.exit_code == 0
    # On a busy machine the job may seem silent meanwhile.
    told = [line for line in result.stdout.splitlines() if "last reported" not in line]
    trouble, *rest = told
    assert "IncompleteRead" in trouble
    assert trouble.endswith("; trying again")
    assert rest[-1].startswith("result: ")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "a.db"
    job = DrivenJob(path)
    job.run(until_trial=2)
    job.close()
    return path


def rename(path: Path, table: str, name: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"ALTER TABLE {table} RENAME TO {name}")


@pytest.mark.parametrize(
    "command", [["jobs"], ["show", JOB], ["export", JOB, "--json"], ["prune", "--older-than", "1"]]
)
def test_a_database_that_fails_is_told_in_one_line(database: Path, command: list[str]) -> None:
    rename(database, "jobs", "gone")
    result = run(*command, "--database", f"sqlite:///{database}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: the database cannot be used: no such table: jobs\n"


def test_watching_goes_on_when_the_database_is_there_again(
    database: Path, between_looks: Between
) -> None:
    def end() -> None:
        rename(database, "gone", "jobs")
        store = Store(f"sqlite:///{database}")
        store.jobs.end(JOB, time.time())
        store.close()

    between_looks(lambda: rename(database, "jobs", "gone"), end)
    result = run("watch", JOB, "--database", f"sqlite:///{database}")
    assert result.exit_code == 0
    trouble = result.stdout.splitlines()[1]
    assert trouble == "the database cannot be used: no such table: jobs; trying again"
    assert result.stdout.endswith("ended before its tuning did\n")


@pytest.mark.parametrize(("command", "unbuffered"), [("jobs", ""), ("show", "1"), ("simulate", "")])
def test_a_full_disk_under_the_output_is_told_in_one_line(
    tmp_path: Path, command: str, unbuffered: str
) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    with closing(Store(url)) as store:
        Tuner(store).register(JOB, make_spec())
    cluster = "--nodes 2 --ranks-per-node 1 --bandwidth 1Gbit --latency 1ms"
    arguments = {
        "jobs": ["--database", url],
        "show": [JOB, "--database", url],
        "simulate": ["--model", "resnet50", "--algorithms", *cluster.split()],
    }
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bagua_autotune", command, *arguments[command]],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    said = "bagua-autotune: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_without_the_packages_of_the_service_a_sentence_says_what_to_install() -> None:
    source = str(Path(bagua_autotune.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-m", "bagua_autotune", "jobs"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "bagua-autotune needs the packages of the service, of which click is not installed. "
        "In a clone: pip install '.[service]'\n"
    )
