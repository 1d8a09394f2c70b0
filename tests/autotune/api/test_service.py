"""The routes around the API: token, health, readiness, metrics, description, bugs."""

from __future__ import annotations

import logging
import re
import time

import pytest
from flask import Flask
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from bagua_autotune.api.openapi import document
from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.tables import TrialRow
from tests.autotune.api.driving import JOB, drive
from tests.autotune.support import Ranks, peaked, registration

OPEN_PATHS = ("/", "/healthz", "/readyz", "/metrics")


def test_the_open_routes_answer(client: FlaskClient) -> None:
    assert client.get("/healthz").get_json() == {"status": "ok"}
    assert client.get("/readyz").get_json() == {"status": "ok"}
    for link in client.get("/").get_json()["links"]:
        assert client.get(link).status_code == 200


def test_a_token_guards_the_api_and_nothing_else(store: Store) -> None:
    settings = Settings.load({"BAGUA_AUTOTUNE_TOKEN": "sésame"}, database="sqlite://")
    client = create_app(settings, store).test_client()
    for path in OPEN_PATHS:
        assert client.get(path).status_code == 200
    right = {"Authorization": b"Bearer s\xc3\xa9same".decode("latin-1")}
    for wrong in ({}, {"Authorization": "sésame"}, {"Authorization": "Bearer sesame"}):
        response = client.get("/api/v2/jobs", headers=wrong)
        assert response.status_code == 401
        assert "BAGUA_AUTOTUNE_TOKEN" in response.get_json(force=True)["detail"]
        assert client.get("/api/v9/nowhere", headers=wrong).status_code == 401
    assert client.get("/api/v2/jobs", headers=right).status_code == 200
    assert "sésame" not in repr(settings)


def test_a_store_that_fails_is_a_503_and_not_ready(app: Flask, store: Store, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OperationalError("SELECT", {}, Exception("disk I/O error"))

    monkeypatch.setattr(store.database, "reading", fail)
    client = app.test_client()
    for path in ("/readyz", "/metrics", "/api/v2/jobs"):
        response = client.get(path)
        assert response.status_code == 503
        assert "disk" not in response.text
    assert client.get("/healthz").status_code == 200


def test_a_bug_is_logged_and_not_shown(app: Flask, caplog: pytest.LogCaptureFixture) -> None:
    @app.get("/bug")
    def bug() -> None:
        raise RuntimeError("secret")

    with caplog.at_level(logging.ERROR):
        response = app.test_client().get("/bug")
    assert response.status_code == 500
    assert response.content_type == "application/problem+json"
    assert "secret" not in response.text
    assert "secret" in caplog.text


def scrape(client: FlaskClient) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_tell_of_jobs_and_requests(client: FlaskClient) -> None:
    assert not [key for key in scrape(client) if key[0].startswith("bagua_autotune_job")]
    client.put(JOB, json=registration())
    ranks = Ranks(noise=0.001)
    state = drive(client, ranks, steps=10)
    client.get("/favicon.ico")
    found = scrape(client)
    assert found["bagua_autotune_job_state", "digits", "finished"] == 1
    assert found["bagua_autotune_job_state", "digits", "tuning"] == 0
    assert found["bagua_autotune_trials", "digits", "measured"] == state["result"]["trials"]
    contact = found["bagua_autotune_job_last_contact_timestamp_seconds", "digits"]
    assert contact == pytest.approx(time.time(), abs=600)
    assert found["bagua_autotune_speedup_ratio", "digits"] == state["result"]["speedup"]
    assert found["bagua_autotune_step_seconds", "baseline", "digits"] == pytest.approx(
        0.23, abs=0.1
    )
    assert found["bagua_autotune_decision_seconds_count",] >= state["result"]["trials"]
    route = "/api/v2/jobs/<job_id>"
    assert found["bagua_autotune_requests_total", "201", "PUT", route] == 1
    assert found["bagua_autotune_requests_total", "404", "any", "unmatched"] == 1
    assert found["bagua_autotune_rounds_total",] == 0


def test_metrics_tell_of_the_latest_round(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    drive(client, Ranks(noise=0.001), steps=10)
    slower = Ranks(noise=0.001, step_seconds=lambda configuration: 3 * peaked(configuration))
    before = scrape(client)
    client.post(f"{JOB}/events", json={"kind": "drift", "step": 10**6, "seconds": 0.6})
    drive(client, slower, steps=10)
    found = scrape(client)
    assert found["bagua_autotune_rounds_total",] == 1
    key = ("bagua_autotune_step_seconds", "baseline", "digits")
    assert found[key] == pytest.approx(3 * before[key], rel=0.05)


def test_one_broken_job_does_not_hide_the_others(client: FlaskClient, store: Store) -> None:
    for job, name in (("job", "digits"), ("broken", "broken")):
        client.put(f"/api/v2/jobs/{job}", json=registration(name=name))
    with store.database.writing() as session:
        broken = update(TrialRow).where(TrialRow.job_id == "broken")
        session.execute(broken.values(configuration=[1], cost=1e300))
    jobs = client.get("/api/v2/jobs").get_json()["jobs"]
    assert [job["id"] for job in jobs] == ["job"]
    assert {key[1] for key in scrape(client) if key[0] == "bagua_autotune_job_state"} == {"digits"}


def test_jobs_that_ended_or_fell_silent_leave_the_metrics(
    client: FlaskClient, store: Store
) -> None:
    client.put("/api/v2/jobs/job", json=registration())
    client.put("/api/v2/jobs/old", json=registration(name="old"))
    assert ("bagua_autotune_job_state", "old", "tuning") in scrape(client)
    store.touch("old", 0.0)
    client.post("/api/v2/jobs/job/events", json={"kind": "ended"})
    assert not [key for key in scrape(client) if {"old", "digits"} & set(key)]


def test_the_description_is_that_of_the_routes(app: Flask) -> None:
    described = {
        (method.upper(), path)
        for path, methods in document()["paths"].items()
        for method in methods
    }
    routes = {
        (method, re.sub(r"<(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        if rule.rule.startswith("/api/v2")
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    assert described == routes


def test_every_reference_of_the_description_leads_somewhere(client: FlaskClient) -> None:
    response = client.get("/api/v2/openapi.json")
    schemas = response.get_json()["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', response.text))
    assert references
    assert references <= set(schemas)
    registration_schema = schemas["JobSpec"]
    assert registration_schema["additionalProperties"] is False
    assert "ranks_per_node" in registration_schema["required"]
