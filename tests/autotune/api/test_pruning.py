"""``POST /api/v2/prune`` and ``DELETE /api/v2/jobs/ID``; the dry run and the token of the first are
in the tests of its command."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.store import Store
from tests.autotune.api.driving import assert_problem
from tests.autotune.support import make_spec, registration, stored_jobs


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "older_than_days"),
        ({"older_than_days": 0}, "older_than_days"),
        ({"older_than_days": "30"}, "older_than_days"),
        ({"older_than_days": 1, "dry": True}, "dry"),
    ],
)
def test_jobs_are_deleted_only_where_the_request_is_valid(
    client: FlaskClient, store: Store, body: dict[str, Any], field: str
) -> None:
    store.jobs.create("old", make_spec(), at=1.0)
    assert_problem(client.post("/api/v2/prune", json=body), 422, field)
    assert [job.id for job in stored_jobs(store)] == ["old"]
    answer = client.post("/api/v2/prune", json={"older_than_days": 1}).get_json()
    assert answer["dry_run"] is False
    assert [(job["id"], job["state"]) for job in answer["jobs"]] == [("old", "tuning")]
    assert answer["jobs"][0]["last_contact_at"] == "1970-01-01T00:00:01Z"
    assert stored_jobs(store) == []


def test_a_job_is_deleted(client: FlaskClient) -> None:
    path = "/api/v2/jobs/job"
    client.put(path, json=registration())
    client.post(f"{path}/events", json={"kind": "ended"})
    deleted = client.delete(path)
    assert deleted.status_code == 200
    assert [(job["id"], job["state"]) for job in deleted.get_json()["jobs"]] == [("job", "ended")]
    for gone in (client.delete(path), client.get(path)):
        assert_problem(gone, 404, "'job'")
    assert client.get("/api/v2/jobs").get_json()["jobs"] == []


def test_the_log_says_who_had_jobs_deleted(
    client: FlaskClient, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bagua_autotune.api.v2")
    for name in ("gone", "old"):
        store.jobs.create(name, make_spec(), at=1.0)
    client.delete("/api/v2/jobs/gone")
    client.post("/api/v2/prune", json={"older_than_days": 3, "dry_run": True})
    client.post("/api/v2/prune", json={"older_than_days": 3})
    assert caplog.messages == [
        "audit: deleted: 1 jobs (gone), by 127.0.0.1",
        "audit: pruned after 3 days: 1 jobs (old), by 127.0.0.1",
    ]


def test_a_training_that_runs_registers_again_when_its_job_is_deleted(client: FlaskClient) -> None:
    path, report = "/api/v2/jobs/job", {"trial": 0, "steps": [{"step": 1, "seconds": [0.1] * 4}]}
    client.put(path, json=registration())
    client.post(f"{path}/observations", json=report)
    for words in ("may still run", "add ?force=true"):
        assert_problem(client.delete(path), 409, words)
    assert client.delete(path, query_string={"force": "yes"}).status_code == 422
    assert client.delete(path, query_string={"force": "false"}).status_code == 409
    assert client.get(f"{path}/observations").get_json()["observations"]
    assert client.delete(path, query_string={"force": "true"}).status_code == 200
    # What its client does: it asks whether the job is known, and registers it.
    for answer in (
        client.post(f"{path}/observations", json=report),
        client.post(f"{path}/events", json={"kind": "note", "message": "here"}),
        client.get(f"{path}/state"),
    ):
        assert answer.status_code == 404
    assert client.put(path, json=registration()).status_code == 201
    assert client.post(f"{path}/observations", json=report).get_json()["trial"]["index"] == 0
    assert len(client.get(f"{path}/observations").get_json()["observations"]) == 1


def test_what_is_no_job_is_not_deleted(client: FlaskClient) -> None:
    assert client.delete("/api/v2/jobs/a.b").status_code == 422
    assert client.delete("/api/v2/jobs").status_code == 405
