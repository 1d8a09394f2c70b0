"""The whole of /metrics on a real service: what a job's life looks like from Prometheus."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import TrialRow
from tests.autotune.api.driving import JOB, drive, settle
from tests.autotune.metrics.scraping import of, scrape
from tests.autotune.support import Ranks, peaked, registration

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
