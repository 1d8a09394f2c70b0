"""The whole of /metrics on a real service: what a job's life looks like from Prometheus; its names
and words, as docs/monitoring.md lists them; and what is said of the database as a whole."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from bagua_autotune.app import create_app
from bagua_autotune.metrics.exposition import STORE_ERRORS, label_of
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import TrialRow
from tests.autotune.api.driving import JOB, Samples, drive, of, scrape, settle
from tests.autotune.support import MIB, Ranks, make_spec, peaked, registration

SECONDS = {"low": 0.1, "high": 0.4}


def test_a_job_is_told_of_from_its_registration_to_its_result(client: FlaskClient) -> None:
    assert not of(scrape(client), "job_state")
    client.put(JOB, json=registration())
    found = scrape(client)
    assert of(found, "job_state") == {
        ("digits", "tuning"): 1,
        ("digits", "confirming"): 0,
        ("digits", "finished"): 0,
        ("digits", "ended"): 0,
        ("digits", "lost"): 0,
    }
    assert of(found, "job_ranks") == {("digits",): 4}
    assert not of(found, "current_trial")  # the ranks have yet to run it
    assert not of(found, "speedup_ratio")
    assert not of(found, "job_result")
    state = drive(client, Ranks(noise=0.001), steps=10)
    found = scrape(client)
    result = state["result"]
    assert of(found, "job_state")["digits", "finished"] == 1
    assert not of(found, "current_trial")
    assert of(found, "job_result") == {("digits", "winner"): 1}
    assert of(found, "trials")["digits", "measured"] == result["trials"]
    assert of(found, "speedup_ratio") == {("digits",): result["speedup"]}
    assert of(found, "speedup_lower_ratio") == {("digits",): result["low"]}
    assert of(found, "speedup_upper_ratio") == {("digits",): result["high"]}
    assert of(found, "payback_steps") == {("digits",): result["payback_steps"]}
    assert of(found, "search_cost_seconds")["digits",] == pytest.approx(result["cost_seconds"])
    baseline, incumbent = (
        of(found, f"{role}_step_seconds")["digits",] for role in ("baseline", "incumbent")
    )
    assert SECONDS["low"] < incumbent < baseline < SECONDS["high"]
    chosen = result["configuration"]
    assert of(found, "knob_value") == {("digits", "bucket_bytes"): chosen["bucket_bytes"]}
    assert ("digits", "hierarchical", chosen["hierarchical"]) in of(found, "configuration_info")
    last = of(found, "job_last_contact_timestamp_seconds")["digits",]
    assert last >= of(found, "job_started_timestamp_seconds")["digits",]
    assert last == pytest.approx(time.time(), abs=600)


def test_steps_are_counted_once(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    steps = [{"step": step, "seconds": [0.1, 0.2, 0.2, 0.2]} for step in range(3)]
    for count in (2, 2, 3):  # sent again, and then with one more
        client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps[:count]})
    found = scrape(client)
    assert of(found, "step_seconds_count") == {("digits",): 3}
    assert of(found, "step_seconds_sum")["digits",] == pytest.approx(0.6)
    buckets = of(found, "step_seconds_bucket")
    assert (buckets["digits", "0.1"], buckets["digits", "0.25"]) == (0, 3)
    assert of(found, "search_steps_total") == {("digits",): 3}


def test_a_round_after_a_drift(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    drive(client, Ranks(noise=0.001), steps=10)
    before = scrape(client)
    drift = {"kind": "drift", "step": 10**6, "seconds": 0.6}
    settle(client, client.post(f"{JOB}/events", json=drift).get_json())
    again = scrape(client)
    assert of(before, "job_result")
    for name in ("job_result", "speedup_ratio", "baseline_step_seconds", "current_step_seconds"):
        assert not of(again, name), name
    slower = Ranks(noise=0.001, step_seconds=lambda configuration: 3 * peaked(configuration))
    drive(client, slower, steps=10)
    found = scrape(client)
    for name in ("drifts_total", "rounds_total"):
        assert of(found, name)["digits",] == of(before, name)["digits",] + 1
    for name in ("search_steps_total", "search_seconds_total"):
        assert of(found, name)["digits",] > of(before, name)["digits",]
    old, new = (of(samples, "baseline_step_seconds")["digits",] for samples in (before, found))
    assert new == pytest.approx(3 * old, rel=0.05)


def test_step_times_are_those_of_the_trial_that_is_told(client: FlaskClient) -> None:
    state = client.put(JOB, json=registration()).get_json()
    for number, seconds in ((0, 0.4), (1, 0.1)):
        client.post(f"{JOB}/events", json={"kind": "switched", "trial": number})
        found = scrape(client)
        assert of(found, "trials")["digits", "running"] == 1
        assert of(found, "current_trial") == {("digits",): number}
        assert not of(found, "current_step_seconds")
        step = 0
        while state["trial"] and state["trial"]["index"] == number:
            body = {"step": 100 * number + step, "seconds": [seconds] * 4}
            state = client.post(
                f"{JOB}/observations", json={"trial": number, "steps": [body]}
            ).get_json()
            state = settle(client, state)
            step += 1
            # Also once it is closed: the ranks run it until they have switched.
            found = scrape(client)
            assert of(found, "current_trial") == {("digits",): number}
            assert of(found, "current_step_seconds") == {("digits",): seconds}


def test_a_job_that_cannot_be_read_is_left_out(
    client: FlaskClient, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for job, name in (("job", "digits"), ("broken", "broken")):
        client.put(f"/api/v2/jobs/{job}", json=registration(name=name))
    broken = update(TrialRow).where(TrialRow.job_id == "broken")
    store.database.write(broken.values(configuration=[1], cost=1e300))
    for _ in range(2):
        assert {key[1] for key in scrape(client) if len(key) > 1 and "job" in key[0]} == {"digits"}
    told = [record for record in caplog.records if "broken cannot be read" in record.message]
    assert len(told) == 1


def test_a_store_that_fails_leaves_what_the_service_counts(
    app: Flask, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OperationalError("SELECT", {}, Exception("disk I/O error"))

    client = app.test_client()
    client.put(JOB, json=registration())
    monkeypatch.setattr(store.database, "read", fail)
    assert client.get("/api/v2/jobs").status_code == 503
    found = scrape(client)
    assert of(found, "store_errors_total")["unavailable",] == 2
    assert of(found, "store_errors_total")["busy",] == 0
    assert not of(found, "job_state")
    assert found["process_resident_memory_bytes",] > 0
    monkeypatch.undo()
    assert of(scrape(client), "job_state")


def test_a_decision_that_the_store_fails_is_counted(
    client: FlaskClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("database is locked"))

    client.put(JOB, json=registration())
    monkeypatch.setattr(store.trials, "advance", fail)
    steps = [{"step": step, "seconds": [0.2] * 4} for step in range(20)]
    answer = client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps})
    assert answer.status_code == 200
    settle(client, answer.get_json())
    assert of(scrape(client), "store_errors_total")["busy",] == 1


def test_requests_and_decisions_are_counted(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    trials = drive(client, Ranks(noise=0.001), steps=10)["result"]["trials"]
    client.get("/favicon.ico")
    found = scrape(client)
    route = "/api/v2/jobs/<job_id>"
    assert of(found, "requests_total")["201", "PUT", route] == 1
    assert of(found, "requests_total")["404", "any", "unmatched"] == 1
    assert of(found, "proposal_seconds_count")[()] >= trials
    assert len(of(found, "build_info")) == 1


def test_promtool_finds_nothing_to_say(client: FlaskClient) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    client.put(JOB, json=registration())
    drive(client, Ranks(noise=0.001), steps=10)
    text = client.get("/metrics").get_data()
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert not checked.stdout + checked.stderr


ONE_SIZE = {
    "knobs": {"bucket_bytes": {"type": "log_integer", "low": 25 * MIB, "high": 25 * MIB}},
    "default_configuration": {"bucket_bytes": 25 * MIB},
}


def flat(configuration: object) -> float:
    return 0.2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "nothing_faster"),
        ({"limits": {"remaining_steps": 50}}, "too_few_steps"),
        (ONE_SIZE, "nothing_to_try"),
        ({"limits": {"max_samples": 1}}, "only_default"),
    ],
)
def test_why_a_default_is_kept(client: FlaskClient, changes: dict[str, Any], reason: str) -> None:
    client.put(JOB, json=registration(**changes))
    drive(client, Ranks(noise=0.001, step_seconds=flat), steps=10)
    assert of(scrape(client), "job_result") == {("digits", reason): 1}


def test_the_best_of_an_earlier_job_is_kept(client: FlaskClient) -> None:
    client.put("/api/v2/jobs/before", json=registration())
    drive(client, Ranks(noise=0.001, step_seconds=flat), 10, "/api/v2/jobs/before")
    client.put(JOB, json=registration())
    drive(client, Ranks(noise=0.001, step_seconds=flat), steps=10)
    assert of(scrape(client), "job_result") == {("digits", "earlier_best"): 1}


def test_ranks_that_disagree_all_the_time(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    for trial in range(3):
        said = {"kind": "disagreement", "trial": trial, "message": "rank 3 disagreed with the rest"}
        settle(client, client.post(f"{JOB}/events", json=said).get_json())
    found = scrape(client)
    assert of(found, "job_result") == {("digits", "disagreement"): 1}
    assert of(found, "trial_failures_total")["digits", "disagreement"] == 3


def test_what_clients_say_changes_no_reason(client: FlaskClient) -> None:
    """Neither of a trial nor of the result, whose final choice the ranks could not carry out."""
    client.put(JOB, json=registration())
    said = {"kind": "disagreement", "message": "nothing was clearly faster"}
    client.post(f"{JOB}/events", json={**said, "trial": 0})
    drive(client, Ranks(noise=0.001), steps=10)
    assert of(scrape(client), "job_result") == {("digits", "winner"): 1}
    client.post(f"{JOB}/events", json=said)
    found = scrape(client)
    assert of(found, "job_result") == {("digits", "disagreement"): 1}
    failures = {"disagreement": 1, "diverged": 0, "run_failed": 0}
    told = of(found, "trial_failures_total")
    assert told == {("digits", reason): count for reason, count in failures.items()}


def test_a_training_that_suffers(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    said = {"kind": "diverged", "message": "the loss is not finite"}
    client.post(f"{JOB}/events", json={**said, "trial": 0})
    drive(client, Ranks(noise=0.001), steps=10)
    client.post(f"{JOB}/events", json=said)
    found = scrape(client)
    assert of(found, "job_result") == {("digits", "diverged"): 1}
    # The trial, and the run of what was kept.
    assert of(found, "trial_failures_total")["digits", "diverged"] == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PoolTimeout("QueuePool limit reached"), "busy"),
        (OperationalError("BEGIN", {}, Exception("database is locked")), "busy"),
        (OperationalError("SELECT", {}, Exception("disk I/O error")), "unavailable"),
        (IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed")), "statement"),
        (SQLAlchemyError("?"), "other"),
    ],
)
def test_errors_of_the_store(error: SQLAlchemyError, reason: str) -> None:
    assert label_of(error) == reason
    assert reason in STORE_ERRORS


def scraped(url: str) -> Samples:
    with closing(Store(url)) as store:
        return scrape(create_app(Settings(), store).test_client())


def test_a_file_s_size_and_the_room_on_its_disk(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path / 'a.db'}")) as store:
        client = create_app(Settings(), store).test_client()
        before = of(scrape(client), "database_bytes")[()]
        for number in range(40):
            store.jobs.create(str(number), make_spec(), at=1.0)
        found = scrape(client)
    assert before + MIB < of(found, "database_bytes")[()] < 40 * MIB
    total = shutil.disk_usage(tmp_path).total
    assert 0 < of(found, "database_free_bytes")[()] <= total


def test_a_database_in_memory_and_a_server_have_no_disk_and_a_server_a_size(
    postgresql_url: str,
) -> None:
    memory, server = scraped("sqlite://"), scraped(postgresql_url)
    assert not of(memory, "database_bytes")
    assert of(server, "database_bytes")[()] > MIB
    assert not of(memory, "database_free_bytes") | of(server, "database_free_bytes")


@pytest.mark.parametrize("team", [None, "vision"])
def test_jobs_of_teams_that_are_in_no_file_make_no_labels(team: str | None) -> None:
    with closing(Store("sqlite://")) as store:
        store.jobs.create("job", make_spec(team=team), at=1.0)
        client = create_app(Settings(), store).test_client()
        assert of(scrape(client), "team_running") == {("none",): 1}


DOCUMENT = Path(__file__).parents[3] / "docs" / "monitoring.md"
ROW = re.compile(r"^\| `(bagua_autotune_\w+)(?:\{([\w,]+)\})?` \|", re.MULTILINE)
# The kind of a sample, not of what it is of.
BUCKET = "le"
MEMORY = {"peak_bytes": 5, "limit_bytes": 9, "device_bytes": 10}


def documented() -> dict[str, set[str]]:
    rows = ROW.findall(DOCUMENT.read_text())
    assert len({name for name, _ in rows}) == len(rows)
    return {name: set(filter(None, labels.split(","))) for name, labels in rows}


def told(client: FlaskClient) -> dict[str, set[str]]:
    text = client.get("/metrics").text
    names = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
    labels = {name: set[str]() for name in names if name.startswith("bagua_autotune_")}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            base = re.sub(r"_(bucket|sum|count)$", "", sample.name)
            for name in {sample.name, base} & labels.keys():
                labels[name] |= sample.labels.keys() - {BUCKET}
    return labels


def test_the_table_is_that_of_the_metrics(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    computing = [0.1, 0.1, 0.1, 0.15]  # the last rank is slow
    steps = [{"step": n, "seconds": [0.2] * 4, "compute_seconds": computing} for n in range(1, 9)]
    client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps, "memory": MEMORY})
    running = told(client)
    drive(client, Ranks(noise=0.001), steps=10, memory=MEMORY)
    finished = told(client)
    assert {name: running[name] | finished[name] for name in finished} == documented()
