"""Teams: what a team's token reaches, how many jobs it may have, and what it shares with nobody."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from pydantic import ValidationError

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.api.driving import assert_problem, drive, of, scrape
from tests.autotune.support import Ranks, make_spec, registration

ENDED = {"kind": "ended"}
TEAMS = [
    {"name": "vision", "token": "see", "most_jobs": 2},
    {"name": "speech", "token_sha256": hashlib.sha256(b"hear").hexdigest()},
]


@pytest.fixture
def teams_app(store: Store, tmp_path: Path) -> Flask:
    path = tmp_path / "teams.json"
    path.write_text(json.dumps(TEAMS))
    variables = {"BAGUA_AUTOTUNE_TOKEN": "all", "BAGUA_AUTOTUNE_TEAMS": str(path)}
    return create_app(Settings.load(variables, database="sqlite://"), store)


def with_token(app: Flask, token: str) -> FlaskClient:
    client = app.test_client()
    client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {token}"
    return client


@pytest.fixture
def operator(teams_app: Flask) -> FlaskClient:
    return with_token(teams_app, "all")


@pytest.fixture
def vision(teams_app: Flask) -> FlaskClient:
    return with_token(teams_app, "see")


@pytest.fixture
def speech(teams_app: Flask) -> FlaskClient:
    return with_token(teams_app, "hear")


def names(client: FlaskClient) -> list[str]:
    return [job["id"] for job in client.get("/api/v2/jobs").get_json()["jobs"]]


def detail(response: Any) -> str:
    assert response.content_type == "application/problem+json"
    return str(response.get_json(force=True)["detail"])


@pytest.mark.parametrize("token", ["seen", "", hashlib.sha256(b"hear").hexdigest(), "see\xff"])
def test_other_tokens_reach_nothing(teams_app: Flask, token: str) -> None:
    response = with_token(teams_app, token).get("/api/v2/jobs")
    assert_problem(response, 401, "a team's token")
    bare = teams_app.test_client().get("/api/v2/jobs", headers={"Authorization": "see"})
    assert bare.status_code == 401


def test_a_team_reaches_its_own_jobs_and_the_service_s_token_all(
    operator: FlaskClient, vision: FlaskClient, speech: FlaskClient
) -> None:
    for client, job_id in ((operator, "nobodys"), (vision, "seen"), (speech, "heard")):
        path = f"/api/v2/jobs/{job_id}"
        assert client.put(path, json=registration()).status_code == 201
        assert client.put(path, json=registration()).status_code == 200
        state = client.post(f"{path}/observations", json={"trial": 0, "steps": []})
        assert state.status_code == 200
    assert (names(vision), names(speech)) == (["seen"], ["heard"])
    assert sorted(names(operator)) == ["heard", "nobodys", "seen"]
    listed = operator.get("/api/v2/jobs").get_json()["jobs"]
    assert {job["id"]: job["team"] for job in listed}["seen"] == "vision"
    assert vision.get("/api/v2/jobs?after=seen").get_json()["jobs"] == []
    for job_id in ("heard", "nobodys"):
        assert vision.get(f"/api/v2/jobs?after={job_id}").status_code == 404
        path = f"/api/v2/jobs/{job_id}"
        absent = [path.replace(job_id, "absent"), path]
        for part in ("", "/state", "/overview", "/trials.csv", "/export.json", "/events"):
            said = [detail(vision.get(each + part)) for each in absent]
            assert said[1] == said[0].replace("absent", job_id), "nobody finds out that it is there"
        ended = vision.post(f"{path}/events", json=ENDED)
        assert (ended.status_code, vision.delete(f"{path}?force=true").status_code) == (404, 404)
        assert vision.put(path, json=registration()).status_code == 409
        assert operator.get(path).get_json()["state"] == "tuning"


def test_what_is_about_more_than_a_team_s_jobs_is_not_for_it(
    operator: FlaskClient, vision: FlaskClient
) -> None:
    vision.put("/api/v2/jobs/job", json=registration())
    refused = (
        vision.post("/api/v2/prune", json={"older_than_days": 1}),
        vision.post("/api/v2/copies", json={}),
        vision.get("/api/v2/jobs/job/copy"),
    )
    for response in refused:
        assert_problem(response, 403, "the service's own token")
    assert vision.get("/api/v2/openapi.json").status_code == 200
    copy = operator.get("/api/v2/jobs/job/copy").get_json()
    assert "team" not in copy["jobs"][0]["spec"]


def test_no_registration_says_whose_it_is(operator: FlaskClient, vision: FlaskClient) -> None:
    for client in (operator, vision):
        response = client.put("/api/v2/jobs/job", json=registration(team="speech"))
        assert_problem(response, 422, "the token says")
    assert names(operator) == []


def test_a_job_above_the_quota_has_to_wait(vision: FlaskClient, speech: FlaskClient) -> None:
    def put(client: FlaskClient, job_id: str) -> Any:
        return client.put(f"/api/v2/jobs/{job_id}", json=registration(name=job_id))

    for number in range(3):
        assert put(speech, f"speech-{number}").status_code == 201, "it has no quota"
    assert [put(vision, job_id).status_code for job_id in ("one", "two")] == [201, 201]
    refused = put(vision, "three")
    said = "vision has as many jobs that have not ended as it may have (2)"
    assert_problem(refused, 429, said)
    assert int(refused.headers["Retry-After"]) > 0
    assert put(vision, "two").status_code == 200, "it is counted already"
    vision.post("/api/v2/jobs/one/events", json=ENDED)
    assert put(vision, "three").status_code == 201
    assert put(vision, "one").status_code == 429, "it would be resumed"
    assert vision.delete("/api/v2/jobs/two?force=true").status_code == 200
    assert put(vision, "one").status_code == 200


def test_a_job_takes_over_nothing_of_another_team_s(
    operator: FlaskClient, vision: FlaskClient, speech: FlaskClient, store: Store
) -> None:
    def begin(client: FlaskClient, job_id: str) -> Any:
        client.put(f"/api/v2/jobs/{job_id}", json=registration())
        return store.jobs.get(job_id).inherited

    begin(vision, "job")
    drive(vision, Ranks(noise=0.001), steps=10)
    vision.post("/api/v2/jobs/job/events", json=ENDED)
    assert begin(speech, "heard") is None
    inherited = begin(vision, "again")
    assert inherited.source == "job"
    begin(vision, "cut-short")
    vision.post("/api/v2/jobs/cut-short/events", json=ENDED)
    begin(speech, "another")
    assert store.lives.place_of("another").previous is None
    assert "cut-short" in names(vision), "it has no later life that would stand for it"


def test_the_log_says_which_team_deleted_a_job(
    vision: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    vision.put("/api/v2/jobs/job", json=registration())
    caplog.set_level("INFO", "bagua_autotune.api.v2")
    vision.delete("/api/v2/jobs/job?force=true")
    assert caplog.messages[-1] == "audit: deleted: 1 jobs (job), by 127.0.0.1, team vision"


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("[", "teams.json"),
        ([{"name": "a b", "token": "secret"}], "0.name"),
        ([{"name": "a"}], "either a token or a token_sha256"),
        ([{"name": "a", "token": "secret", "token_sha256": "0" * 64}], "either a token"),
        ([{"name": "a", "token_sha256": "secret"}], "0.token_sha256"),
        ([{"name": "a", "token_sha256": hashlib.sha256(b"").hexdigest()}], "an empty token"),
        ([{"name": "a", "token": "secret", "most_jobs": 0}], "0.most_jobs"),
        ([{"name": "a", "token": "secret"}, {"name": "b", "token": "secret"}], "same token"),
        ([{"name": "a", "token": "secret"}, {"name": "a", "token": "2"}], "same name"),
        ([{"name": "a", "token": "all"}], "same token"),
    ],
)
def test_a_wrong_file_is_refused_without_telling_tokens(
    tmp_path: Path, content: Any, wrong: str
) -> None:
    path = tmp_path / "teams.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValidationError, match=wrong) as found:
        Settings.load({"BAGUA_AUTOTUNE_TOKEN": "all"}, teams=str(path), database="sqlite://")
    assert all("secret" not in error["msg"] for error in found.value.errors())


def test_teams_need_a_file_and_a_token_of_the_service(tmp_path: Path) -> None:
    path = tmp_path / "teams.json"
    with pytest.raises(ValidationError, match="cannot be read"):
        Settings.load({"BAGUA_AUTOTUNE_TOKEN": "all"}, teams=str(path))
    path.write_text(json.dumps(TEAMS))
    with pytest.raises(ValidationError, match="needs BAGUA_AUTOTUNE_TOKEN"):
        Settings.load({}, teams=str(path))


def test_the_metrics_count_the_jobs_of_each_team_and_of_no_other(
    operator: FlaskClient, vision: FlaskClient, store: Store
) -> None:
    for job in ("first", "second"):
        assert vision.put(f"/api/v2/jobs/{job}", json=registration()).status_code == 201
    vision.post("/api/v2/jobs/second/events", json=ENDED)
    operator.put("/api/v2/jobs/mine", json=registration())
    store.jobs.create("left", make_spec(team="dissolved"), at=1.0)
    assert of(scrape(operator), "team_running") == {("vision",): 1, ("speech",): 0, ("none",): 2}
