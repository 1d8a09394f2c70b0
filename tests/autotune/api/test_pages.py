"""Lists that are read in pages."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.views import lists
from tests.autotune.api.driving import JOB, assert_problem, drive
from tests.autotune.support import Ranks, registration


def read_all(client: FlaskClient, path: str, name: str, limit: int) -> list[list[Any]]:
    """The pages."""
    found, after = [], ""
    while after is not None:
        answer = client.get(
            path, query_string={"limit": limit} | ({"after": after} if after else {})
        )
        assert answer.status_code == 200
        found.append(answer.get_json()[name])
        after = answer.get_json()["next"]
    return found


@pytest.fixture
def tuned(client: FlaskClient) -> FlaskClient:
    client.put(JOB, json=registration())
    drive(client, Ranks(seed=1, noise=0.01))
    for step in range(5):
        client.post(f"{JOB}/events", json={"kind": "note", "step": step, "message": "said"})
    return client


@pytest.mark.parametrize("name", ["trials", "observations", "events"])
def test_pages_together_are_the_whole_list(tuned: FlaskClient, name: str) -> None:
    whole = tuned.get(f"{JOB}/{name}").get_json()
    assert whole["next"] is None
    assert len(whole[name]) > 4
    parts = read_all(tuned, f"{JOB}/{name}", name, 3)
    assert [item for part in parts for item in part] == whole[name]
    assert {len(part) for part in parts[:-1]} == {3}
    # A last page that is full has nothing behind it.
    assert len(read_all(tuned, f"{JOB}/{name}", name, len(whole[name]))) == 1


def test_a_trials_observations_have_pages_too(tuned: FlaskClient) -> None:
    path = f"{JOB}/observations?trial=1"
    whole = tuned.get(path).get_json()["observations"]
    first = tuned.get(f"{path}&limit=2").get_json()
    rest = tuned.get(f"{path}&after={first['next']}").get_json()
    assert first["observations"] + rest["observations"] == whole
    assert rest["next"] is None


def test_nothing_is_read_twice_while_more_is_written(tuned: FlaskClient) -> None:
    first = tuned.get(f"{JOB}/events?limit=4").get_json()
    tuned.post(f"{JOB}/events", json={"kind": "note", "message": "new"})
    rest = tuned.get(f"{JOB}/events?after={first['next']}").get_json()["events"]
    assert first["events"] + rest == tuned.get(f"{JOB}/events").get_json()["events"]


def test_jobs_have_pages_newest_first(client: FlaskClient) -> None:
    for number in range(5):
        client.put(f"/api/v2/jobs/job{number}", json=registration(name=f"of {number % 2}"))
    parts = read_all(client, "/api/v2/jobs", "jobs", 2)
    assert [[job["id"] for job in part] for part in parts] == [
        ["job4", "job3"],
        ["job2", "job1"],
        ["job0"],
    ]
    named = client.get("/api/v2/jobs?name=of 0&limit=2").get_json()
    assert [job["id"] for job in named["jobs"]] == ["job4", "job2"]
    following = client.get(f"/api/v2/jobs?name=of 0&after={named['next']}").get_json()
    assert [job["id"] for job in following["jobs"]] == ["job0"]


def test_many_ranks_make_pages_short(tuned: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "MOST_VALUES", 12)
    page = tuned.get(f"{JOB}/observations").get_json()
    assert len(page["observations"]) == 3
    assert page["next"] is not None


WRONG = ("limit=0", "limit=x", "limit=10001", "after=%00", "after=1%20", "after=")


@pytest.mark.parametrize("query", WRONG)
def test_what_is_no_page_is_refused(client: FlaskClient, query: str) -> None:
    client.put(JOB, json=registration())
    for path in (f"{JOB}/trials", f"{JOB}/observations", f"{JOB}/events", "/api/v2/jobs"):
        assert_problem(client.get(f"{path}?{query}"), 422, query.partition("=")[0])


def test_a_job_that_is_gone_has_nothing_behind_it(client: FlaskClient) -> None:
    assert client.get("/api/v2/jobs?after=gone").status_code == 404
