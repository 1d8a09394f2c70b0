"""The commands, reading a database and a running service alike."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from bagua_autotune.cli import COMMANDS, OF_OUR_PACKAGES
from bagua_autotune.model.job import Observation, Trial
from bagua_autotune.model.job import Result as TuningResult
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.engine import migrations
from bagua_autotune.store.engine.tables import SCHEMA_VERSION
from bagua_autotune.store.trials import Move
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration
from tests.autotune.cli.conftest import TOKEN, run
from tests.autotune.server import ServeProcess
from tests.autotune.support import MIB, Ranks, drive, make_spec


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished job, a newer one of the same name half way, and one not yet measured."""
    path = tmp_path_factory.mktemp("cli") / "a.db"
    tuner = Tuner(Store(f"sqlite:///{path}"))
    for job_id, name, trials in (("old", "digits", 100), ("new", "digits", 3), ("x", "[b]x", 0)):
        # Jobs that are alike would begin at what is known of the others.
        tuner.register(job_id, make_spec(name=name, fingerprint=job_id))
        drive(tuner, job_id, Ranks(noise=0.001), steps=10, until_trial=trials)
    tuner.store.close()
    return path


@pytest.fixture(scope="module")
def service(database: Path) -> Iterator[str]:
    with ServeProcess(database, BAGUA_AUTOTUNE_TOKEN=TOKEN) as running:
        yield running.url


def lines(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.output
    return [line.split("\t") for line in result.output.splitlines()]


def test_jobs_are_listed_newest_first_one_line_each(source: list[str]) -> None:
    header, *rows = lines(run("jobs", *source))
    assert header == ["job", "name", "state", "trials", "speed-up", "runs now", "lives"]
    assert [row[0] for row in rows] == ["x", "new", "old"]
    # On a busy machine a minute may pass before they are listed.
    assert [row[2].removesuffix(", silent") for row in rows] == ["tuning", "tuning", "finished"]
    assert rows[0][4] == "-"
    assert rows[1][4].endswith("x, not confirmed")
    assert rows[2][4].endswith("x")


def test_show_tells_all_of_a_finished_job(source: list[str]) -> None:
    result = run("show", "old", *source)
    text = result.output
    header, first, *_ = lines(result)[1:]
    assert first[: len(header)][:3] == ["0", "search", "measured"]
    assert "job digits (old): finished" in text
    assert "result: bucket 4 MiB, hierarchical: 1." in text
    assert "over the 25 MiB default; " in text
    assert "stock DDP: DistributedDataParallel(model, bucket_cap_mb=" in text
    assert "stock DDP cannot do the rest of the best configuration: hierarchical" in text
    assert text.count("\tbest\n") == 1
    line = "without a service: bagua-autotune export old --configuration > tuned.json, then train"
    assert line in text
    assert "without a service" not in run("show", "x", *source).output


def test_a_silent_job_is_called_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    store = Store(url)
    store.jobs.create("job", make_spec(), at=1.0)
    configuration = Configuration(make_spec().default_configuration)
    store.trials.advance("job", Move(2.0, next_trial=Trial(0, "search", configuration)))
    store.close()
    _, row = lines(run("jobs", "--database", url))
    assert row[2] == "tuning, silent"
    text = run("show", "job", "--database", url).output
    assert re.search("note: the job last reported .* ago", text)


def test_show_tells_what_became_of_the_complexity(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    store = Store(url)
    tuner = Tuner(store)
    tuner.register("job", make_spec(limits={"warmup_seconds": 0}))
    steps = [Observation(n, (0.1 + 0.01 * (n % 7),) * 4, None, n % 7) for n in range(20)]
    tuner.observe("job", 0, steps)
    store.close()
    text = run("show", "job", "--database", url).output
    assert "note: step times are corrected to a batch complexity of 2.5; " in text


def test_show_tells_rounds_cost_and_payback(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    store = Store(url)
    store.jobs.create("job", make_spec(), at=1.0)
    default = Configuration(make_spec().default_configuration)
    chosen = Configuration(default, bucket_bytes=4 * MIB)
    outcome = TuningResult(chosen, "winner", 1.25, 1.2, 1.3, 2, 20, 4.0, "faster")
    outcome = replace(outcome, cost_steps=12.345, cost_seconds=3.7, payback_steps=61)
    for round, first in ((0, 0), (1, 2)):
        if round:
            assert store.jobs.open_round("job", 5.0)
        baseline = Trial(first, "search", default, round=round)
        tried = Trial(first + 1, "search", chosen, round=round)
        measured = Estimate(-1.0, 0.01, 10)
        store.trials.advance("job", Move(2.0, next_trial=baseline))
        store.trials.advance("job", Move(3.0, first, measured, next_trial=tried))
        store.trials.advance(
            "job", Move(4.0, first + 1, replace(measured, center=-1.2), result=outcome)
        )
    store.close()
    result = run("show", "job", "--database", url)
    _, header, *rows = lines(result)
    assert header[:2] == ["round", "trial"]
    assert [row[:2] for row in rows[:4]] == [["0", "0"], ["0", "1"], ["1", "2"], ["1", "3"]]
    assert [row[-1] for row in rows[:4]] == ["", "", "", "best"]
    assert (
        "cost: slower trials and switches lost the time of 12.3 steps of the default (3.7 s)"
        in result.output
    )
    assert "paid back: after 61 steps of the result" in result.output
    assert "job digits (job): finished, round 1" in result.output
    store = Store(url)
    assert store.jobs.open_round("job", 5.0)
    store.close()
    again = run("show", "job", "--database", url).output
    assert "job digits (job): tuning, round 2" in again
    assert "result: faster" in again


def test_show_takes_a_name_and_means_its_newest(source: list[str]) -> None:
    text = run("show", "digits", *source).output
    assert "job digits (new): tuning" in text
    assert "best so far: bucket" in text
    assert "(" in next(line for line in text.splitlines() if line.startswith("best so far"))
    assert "stock DDP" in run("show", "x", *source).output


def test_export_gives_the_trials_as_csv(source: list[str]) -> None:
    exported = run("export", "old", "--csv", *source)
    assert b"\r" not in exported.stdout_bytes
    rows = list(csv.DictReader(io.StringIO(exported.output)))
    assert rows[0]["bucket_bytes"] == str(25 * MIB)
    assert rows[0]["hierarchical"] == "off"
    assert all(float(row["low"]) <= float(row["seconds"]) <= float(row["high"]) for row in rows)


def test_export_gives_the_best_configuration_with_what_it_is_for(source: list[str]) -> None:
    tuned = run("export", "old", "--configuration", *source)
    document = json.loads(tuned.stdout)
    assert tuned.stderr == ""
    assert document["configuration"] == {"bucket_bytes": 4 * MIB, "hierarchical": "leaders"}
    assert document["format"] == 1
    assert (document["job"], document["job_id"]) == ("digits", "old")
    assert document["tensors"]["count"] == len(make_spec().tensors)
    assert document["ranks_per_node"] == list(make_spec().ranks_per_node)
    assert document["summary"].startswith("bucket 4 MiB, hierarchical: 1.")
    half_way = run("export", "new", "--configuration", *source)
    assert "not tuned yet: this is its best configuration so far" in half_way.stderr
    assert json.loads(half_way.stdout)["configuration"].keys() == document["configuration"].keys()
    unmeasured = run("export", "x", "--configuration", *source)
    assert unmeasured.exit_code == 1
    assert "nothing is measured yet" in unmeasured.output


def test_what_is_missing_is_said_in_a_sentence(source: list[str]) -> None:
    for result in (run("show", "nobody", *source), run("export", "nobody", "--csv", *source)):
        assert result.exit_code == 1
        assert "there is no job 'nobody'" in result.output


def test_export_writes_one_format_at_a_time(source: list[str]) -> None:
    none = run("export", "old", *source)
    both = run("export", "old", "--csv", "--json", *source)
    assert (none.exit_code, both.exit_code) == (2, 2)
    assert (none.stdout, both.stdout) == ("", "")
    choose = "choose one of --csv, --json, --profile, --configuration"
    assert f"Error: {choose}" in none.stderr
    assert f"Error: --csv and --json cannot be given together: {choose}" in both.stderr


def test_json_is_what_the_api_answers(
    source: list[str], service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(path: str) -> Any:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        request = urllib.request.Request(f"{service}/api/v2{path}", headers=bearer)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    for arguments, path in (
        (["jobs", "--limit", "2"], "/jobs?limit=2"),
        (["jobs"], "/jobs"),
        (["show", "old"], "/jobs/old/overview"),
    ):
        result = run(*arguments, "--json", *source)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout) == ask(path)
    assert ask("/jobs?limit=2")["next"] == "new"


def test_of_a_service_any_name_can_be_asked_for(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of a script's models have signs that no id has, such as digits#2."""
    monkeypatch.setenv("BAGUA_AUTOTUNE_TOKEN", TOKEN)
    found = run("show", "[b]x", "--json", "--url", service)
    assert json.loads(found.stdout)["job"]["id"] == "x"
    assert "there is no job '%#2'" in run("show", "%#2", "--url", service).stderr


def test_an_address_without_a_scheme_is_http(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE_TOKEN", TOKEN)
    found = run("jobs", "--url", service.removeprefix("http://"))
    assert [row[0] for row in lines(found)[1:]] == ["x", "new", "old"]
    absent = run("jobs", "--url", "127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be read: " in absent.stderr


@pytest.mark.parametrize(
    ("token", "wrong"),
    [("", "it needs a token"), ("another", "it does not accept this token")],
)
def test_a_missing_token_and_a_wrong_one_are_told_apart(
    service: str, monkeypatch: pytest.MonkeyPatch, token: str, wrong: str
) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE_TOKEN", token)
    refused = run("jobs", "--url", service)
    assert refused.exit_code == 1
    set_it = "set BAGUA_AUTOTUNE_TOKEN to that of the service"
    assert refused.stderr == f"Error: {service} answered 401: {wrong}; {set_it}\n"


def test_more_jobs_than_asked_for_are_mentioned_beside_the_table(source: list[str]) -> None:
    some = run("jobs", "--limit", "2", *source)
    assert [line.split("\t")[0] for line in some.stdout.splitlines()] == ["job", "x", "new"]
    assert "more than these 2; see --limit" in some.stderr
    assert run("jobs", "--limit", "3", *source).stderr == ""


def test_the_environment_names_the_database_as_it_does_for_serve(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE_DATABASE", f"sqlite:///{database}")
    assert "digits" in run("jobs").stdout


@pytest.mark.parametrize("command", [["jobs"], ["show", "x"], ["prune", "--older-than", "1"]])
def test_a_mistyped_database_is_not_created(tmp_path: Path, command: list[str]) -> None:
    result = run(*command, "--database", f"sqlite:///{tmp_path / 'typo.db'}")
    assert result.exit_code == 1
    assert "there is no database" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [["jobs"], ["show", "x"], ["export", "x", "--csv"], ["prune", "--older-than", "1"],
     ["watch", "x"], ["watch", "x", "--wait"]],
)  # fmt: skip
def test_the_database_of_an_older_release_is_left_to_it(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    Store(f"sqlite:///{path}").close()
    monkeypatch.setattr(migrations, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    result = run(*command, "--database", f"sqlite:///{path}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is of an older release" in result.stderr
    assert result.stderr.endswith("start this release's service on it once\n")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM schema_version").fetchall() == [
            (SCHEMA_VERSION,)
        ]


@pytest.mark.slow
def test_a_shell_can_complete_commands_and_options() -> None:
    def complete(*words: str) -> str:
        found = subprocess.run(
            [
                sys.executable,
                "-c",
                "from bagua_autotune.cli import main; main(prog_name='bagua-autotune')",
            ],
            env={
                **os.environ,
                "_BAGUA_AUTOTUNE_COMPLETE": "bash_complete",
                "COMP_WORDS": " ".join(words),
                "COMP_CWORD": str(len(words) - 1),
            },
            capture_output=True,
            text=True,
        )
        return found.stdout

    assert complete("bagua-autotune", "pr") == "plain,prune\n"
    assert complete("bagua-autotune", "prune", "--d").split() == [
        "plain,--dry-run",
        "plain,--database",
    ]
    assert "_BAGUA_AUTOTUNE_COMPLETE=bash_source" in run("--help").output


@pytest.mark.parametrize(
    ("name", "sentence"), {**COMMANDS, **OF_OUR_PACKAGES}.items(), ids=[*COMMANDS, *OF_OUR_PACKAGES]
)
def test_the_list_of_commands_says_what_their_own_help_says(name: str, sentence: str) -> None:
    assert sentence in " ".join(run(name, "--help").output.split())


def test_without_the_simulator_a_profile_is_refused_in_a_sentence(
    source: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bagua_autotune.cli.commands.export.hung_in", lambda group: {})
    result = run("export", "old", "--profile", *source)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: the simulator writes --profile, and is not installed\n"


def test_one_training_in_several_lives_is_one_line_and_shown_with_all(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'a.db'}"
    tuner = Tuner(Store(database))
    for job_id in ("one", "two"):
        tuner.register(job_id, make_spec(run="night-shift"))
    tuner.store.close()
    source = ["--database", database]
    _, listed = lines(run("jobs", *source))
    assert (listed[0], listed[-1]) == ("two", "2")
    for job_id, place in (("one", "1 of 2"), ("two", "2 of 2"), ("digits", "2 of 2")):
        title, told, header, first, second, *_ = lines(run("show", job_id, *source))
        assert told == [f"life {place}:"]
        assert header == ["life", "job", "ranks", "began", "end", "trials", "found"]
        assert (first[:3], first[4]) == (["1", "one", "4 on 2 nodes"], "killed")
        assert (second[1], second[4]) == ("two", "running")
        assert title
