"""``POST /api/v2/prune`` and ``DELETE /api/v2/jobs/ID``; the dry run and the token of the first are
in the tests of its command. And requests that wait for no decision."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.deciding.next_step import NextStep
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.store import Store
from bagua_autotune.store.trials import Move
from bagua_autotune.tuning.background import SUPERFLUOUS
from tests.autotune.api.driving import JOB, assert_problem, drive, of, scrape, settle
from tests.autotune.support import Ranks, make_spec, registration, stored_jobs


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


def test_no_request_decides(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    deciders: list[str] = []
    after = NextStep.after

    def watched(*arguments) -> object:
        deciders.append(threading.current_thread().name)
        return after(*arguments)

    monkeypatch.setattr(NextStep, "after", watched)
    state = client.put(JOB, json=registration(limits={"max_samples": 3})).get_json()
    assert state["trial"]["index"] == 0, "the baseline, which needs no decision"
    said = {"kind": "disagreement", "trial": 0, "message": "rank 3 disagreed"}
    settle(client, client.post(f"{JOB}/events", json=said).get_json())
    assert drive(client, Ranks(noise=0.001), steps=10)["state"] == "finished"
    told = {"kind": "drift", "step": 10_000, "seconds": 0.5}
    state = settle(client, client.post(f"{JOB}/events", json=told).get_json())
    assert (state["round"], state["trial"]["index"] > 0) == (1, True)
    assert set(deciders) == {"decisions"}


def test_a_decision_that_fails_is_counted(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise ArithmeticError("singular")

    client.put(JOB, json=registration())
    assert of(scrape(client), "failed_decisions_total")[()] == 0
    monkeypatch.setattr(NextStep, "after", fail)
    steps = [{"step": step, "seconds": [0.2] * 4} for step in range(1, 40)]
    body = {"trial": 0, "steps": steps}
    settle(client, client.post(f"{JOB}/observations", json=body).get_json())
    assert of(scrape(client), "failed_decisions_total")[()] == 1


def test_a_decision_that_another_replica_has_made_is_counted(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    after = NextStep.after

    def outrun(self: NextStep, round_: Round, *arguments: Any) -> Move:
        step = after(self, round_, *arguments)
        assert self._store.trials.advance(round_.job.id, step)
        return step

    client.put(JOB, json=registration())
    assert of(scrape(client), "superfluous_decisions_total")[()] == 0
    monkeypatch.setattr(NextStep, "after", outrun)
    steps = [{"step": step, "seconds": [0.2] * 4} for step in range(1, 40)]
    with caplog.at_level(logging.INFO):
        told = client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps})
        state = settle(client, told.get_json())
    assert state["trial"]["index"] == 1
    assert of(scrape(client), "superfluous_decisions_total")[()] == 1
    assert caplog.text.count(SUPERFLUOUS) == 1
