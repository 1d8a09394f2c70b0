"""The routes around the API: token, health, readiness, description, bugs; and a job of one process,
which is told, shown and exported without a word of buckets or a network."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from bagua_autotune.api.openapi import document
from bagua_autotune.app import create_app
from bagua_autotune.cli import main
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import TrialRow
from bagua_wire.configuration import Value
from tests.autotune.api.driving import JOB, assert_problem, drive
from tests.autotune.support import Ranks, registration

OPEN_PATHS = ("/", "/healthz", "/readyz", "/metrics")


def test_a_token_guards_the_api_and_nothing_else(store: Store) -> None:
    settings = Settings.load({"BAGUA_AUTOTUNE_TOKEN": "sésame"}, database="sqlite://")
    client = create_app(settings, store).test_client()
    for path in OPEN_PATHS:
        assert client.get(path).status_code == 200
    right = {"Authorization": b"Bearer s\xc3\xa9same".decode("latin-1")}
    for wrong in ({}, {"Authorization": "sésame"}, {"Authorization": "Bearer sesame"}):
        assert_problem(client.get("/api/v2/jobs", headers=wrong), 401, "BAGUA_AUTOTUNE_TOKEN")
        assert client.get("/api/v9/nowhere", headers=wrong).status_code == 401
        # A first // is taken for one slash.
        twice = {"PATH_INFO": "//api/v2/jobs"}
        assert client.get(headers=wrong, environ_overrides=twice).status_code == 401
    assert client.get("/api/v2/jobs", headers=right).status_code == 200
    assert "sésame" not in repr(settings)


def test_two_tokens_are_good_while_one_is_changed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    both = {"BAGUA_AUTOTUNE_TOKEN": "new", "BAGUA_AUTOTUNE_PREVIOUS_TOKEN": "old"}
    client = create_app(Settings.load(both, database="sqlite://"), store).test_client()

    def status(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return client.get("/api/v2/jobs", headers=headers).status_code

    with caplog.at_level(logging.INFO):
        assert status("new") == 200
        assert not caplog.records
        assert (status("old"), status("old")) == (200, 200)
        assert [status(wrong) for wrong in ("", "newold", "new,old", "other")] == [401] * 4
    (line,) = [record.message for record in caplog.records if "TOKEN" in record.message]
    assert line.startswith("BAGUA_AUTOTUNE_PREVIOUS_TOKEN is still used: GET /api/v2/jobs, from ")


@pytest.mark.parametrize(
    "path",
    [
        *("/api//v2/jobs", "/api/v2//jobs", "/api/v2/jobs//x/state", "/api/v2/jobs/"),
        *("/api/v1//health_check", "/static//js/job.js", "/jobs//x"),
    ],
)
def test_a_wrong_address_is_answered_as_any_error(client: FlaskClient, path: str) -> None:
    for method in ("GET", "PUT", "POST", "DELETE"):
        answer = client.open(path, method=method, json={})
        assert answer.status_code == 404
        assert answer.content_type == "application/problem+json"


def test_a_store_that_fails_is_a_503_and_not_ready(app: Flask, store: Store, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OperationalError("SELECT", {}, Exception("disk I/O error"))

    monkeypatch.setattr(store.database, "read", fail)
    client = app.test_client()
    for path in ("/readyz", "/api/v2/jobs"):
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


def test_one_broken_job_does_not_hide_the_others(client: FlaskClient, store: Store) -> None:
    for job, name in (("job", "digits"), ("broken", "broken")):
        client.put(f"/api/v2/jobs/{job}", json=registration(name=name))
    broken = update(TrialRow).where(TrialRow.job_id == "broken")
    store.database.write(broken.values(configuration=[1], cost=1e300))
    jobs = client.get("/api/v2/jobs").get_json()["jobs"]
    assert [job["id"] for job in jobs] == ["job"]


KNOB = "recomputed_blocks"
BODY = registration(
    world_size=1,
    ranks_per_node=[1],
    knobs={KNOB: {"type": "categorical", "values": [12, 9, 6, 3, 0]}},
    default_configuration={KNOB: 12},
    software={"torch": "2.13.0"},
)


def _seconds(configuration: Mapping[str, Value]) -> float:
    return 0.1 + 0.002 * int(str(configuration[KNOB]))


def _ranks() -> Ranks:
    return Ranks(seed=1, noise=0.01, step_seconds=_seconds, world_size=1)


def test_it_is_tuned_and_nothing_is_said_of_what_it_does_not_have(client: FlaskClient) -> None:
    assert client.put(JOB, json=BODY).status_code == 201
    result = drive(client, _ranks(), steps=10)["result"]
    assert (result["configuration"], result["kept"]) == ({KNOB: 0}, "winner")
    assert result["summary"].startswith("0 blocks recomputed: 1.2")
    assert "the default (12 blocks recomputed)" in result["summary"]
    overview = client.get(f"{JOB}/overview").get_json()
    assert overview["job"]["world_size"] == 1
    assert overview["ranks"] == []
    assert "with transformers, gradient_checkpointing=False" in overview["stock_ddp"]
    curve, layouts = (client.get(f"{JOB}/{part}").get_json() for part in ("curve", "buckets"))
    assert (curve["curves"], layouts["layouts"]) == ([], [])
    assert layouts["tensors"] == 250, "which the page calls the model's gradients"
    metrics = client.get("/metrics").get_data(as_text=True)
    assert re.search(r"^bagua_autotune_job_ranks\{.*digits.*\} 1", metrics, re.MULTILINE)
    told = [overview["why"], overview["job"], overview["trials"], overview["events"], curve]
    for word in ("bucket", "ommunication", "network", "DistributedDataParallel"):
        assert word not in json.dumps(told)


def test_it_is_exported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    client = create_app(Settings(database=url), Store(url)).test_client()
    client.put(JOB, json=BODY)
    drive(client, _ranks(), steps=10)
    found = {
        name: CliRunner().invoke(main, [*command, "job", "--database", url])
        for name, command in {
            "show": ["show"],
            "csv": ["export", "--csv"],
            "json": ["export", "--json"],
            "file": ["export", "--configuration"],
        }.items()
    }
    assert {name: done.exit_code for name, done in found.items()} == dict.fromkeys(found, 0)
    assert json.loads(found["file"].stdout)["configuration"] == {KNOB: 0}
    assert "stock DDP" not in found["show"].stdout
    assert "bucket" not in found["show"].stdout
