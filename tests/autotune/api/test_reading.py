"""What views are made of: overviews, curves, buckets, lists in pages, downloads; and who
asks again."""

from __future__ import annotations

import csv
import io
import json
import time
from typing import Any

import pytest
from click.testing import CliRunner
from flask import Flask
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.cli import main
from bagua_autotune.model.job import SILENT_SECONDS
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.views import lists
from tests.autotune.api.driving import JOB, assert_problem, drive
from tests.autotune.support import Ranks, counting, registration

GLANCES = ("/overview", "/curve", "/buckets")


@pytest.fixture
def tuned(client: FlaskClient) -> FlaskClient:
    client.put(JOB, json=registration(software={"torch": "2.13.0"}))
    drive(client, Ranks(seed=1, noise=0.01), steps=10)
    return client


def test_an_overview_says_all_in_one_answer(tuned: FlaskClient) -> None:
    found = tuned.get(f"{JOB}/overview").get_json()
    detail = tuned.get(JOB).get_json()
    summary = found["job"]
    for key, value in summary.items():
        if key in detail:
            assert value == detail[key], key
    assert summary["headline"].startswith("Tuned: 1.")
    assert summary["figures"]["speedup"] == detail["result"]["speedup"]
    for key in ("default_configuration", "ranks_per_node", "software", "fingerprint", "limits"):
        assert found[key] == detail[key]
    trials = tuned.get(f"{JOB}/trials").get_json()["trials"]
    shown = [{k: t[k] for k in trials[0]} for t in found["trials"]]
    assert shown == trials
    (best,) = [trial for trial in found["trials"] if trial["is_best"]]
    assert best["configuration"] == detail["result"]["configuration"]
    assert best["words"] in summary["headline"]
    assert "tensors" not in found
    assert found["steps"]["stride"] == 1
    assert len(found["steps"]["points"]) == detail["result"]["steps"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert "DistributedDataParallel(model, bucket_cap_mb=" in found["stock_ddp"]
    assert tuned.get("/api/v2/jobs").get_json()["jobs"] == [summary]


def test_who_lists_jobs_is_told_of_none_that_is_gone_as_if_it_were_tuned(
    client: FlaskClient, store: Store
) -> None:
    for job_id in ("gone", "here"):
        client.put(f"/api/v2/jobs/{job_id}", json=registration(name=job_id))
    store.jobs.touch("gone", time.time() - SILENT_SECONDS - 1)
    listed = client.get("/api/v2/jobs").get_json()["jobs"]
    assert {job["id"]: job["state"] for job in listed} == {"gone": "lost", "here": "tuning"}
    assert {job["id"]: job["is_lost"] for job in listed} == {"gone": True, "here": False}
    assert client.get("/api/v2/jobs/gone").get_json()["is_lost"]
    steps = [{"step": 1, "seconds": [0.2] * 4}]
    body = {"trial": 0, "steps": steps}
    answer = client.post("/api/v2/jobs/gone/observations", json=body).get_json()
    assert (answer["state"], answer["trial"]["index"]) == ("tuning", 0)
    events = client.get("/api/v2/jobs/gone/events").get_json()["events"]
    assert [event["kind"] for event in events] == ["lost", "note"]


def test_who_asks_again_is_told_only_what_changed(tuned: FlaskClient) -> None:
    for path in ("/api/v2/jobs", *(JOB + glance for glance in GLANCES)):
        first = tuned.get(path)
        assert first.headers["Cache-Control"] == "no-cache"
        known = {"If-None-Match": first.headers["ETag"]}
        again = tuned.get(path, headers=known)
        assert (again.status_code, again.data) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
        assert tuned.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    overview = tuned.get(f"{JOB}/overview")
    known = {"If-None-Match": overview.headers["ETag"]}
    tuned.post(f"{JOB}/events", json={"kind": "note", "message": "new"})
    changed = tuned.get(f"{JOB}/overview", headers=known)
    assert changed.status_code == 200
    assert changed.get_json()["events"][-1]["message"] == "new"


def test_a_job_that_is_not_there_is_a_404(client: FlaskClient) -> None:
    for path in (*GLANCES, "/trials.csv", "/export.json"):
        assert_problem(client.get(f"/api/v2/jobs/nobody{path}"), 404, "'nobody'")


def test_downloads_are_what_the_command_line_writes(tmp_path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    store = Store(url)
    client = create_app(Settings(database=url), store).test_client()
    client.put(JOB, json=registration(name="<img src=x onerror=alert(1)>/../ü"))
    steps = [{"step": n, "seconds": [0.1] * 4, "compute_seconds": [0.05] * 4} for n in range(3)]
    client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps})
    for path, option, ending in (
        ("trials.csv", "--csv", "-trials.csv"),
        ("export.json", "--json", ".json"),
    ):
        response = client.get(f"{JOB}/{path}")
        disposition = response.headers["Content-Disposition"]
        assert disposition == f"attachment; filename=img-src-x-onerror-alert-1{ending}"
        command = CliRunner().invoke(main, ["export", "job", option, "--database", url])
        assert command.stdout_bytes == response.data
    assert next(csv.DictReader(io.StringIO(client.get(f"{JOB}/trials.csv").text)))["state"]
    document = json.loads(client.get(f"{JOB}/export.json").text)
    assert document["observations"][0]["compute_seconds"] == [0.05] * 4
    assert document["observations"] == client.get(f"{JOB}/observations").get_json()["observations"]
    for part in ("trials", "events"):
        assert document[part] == client.get(f"{JOB}/{part}").get_json()[part]
    detail = client.get(JOB).get_json()
    assert {name: document[name] for name in detail} == detail
    store.close()


def test_an_export_has_a_line_for_a_step_and_is_sent_while_it_is_made(app: Flask) -> None:
    client = app.test_client()
    client.put(JOB, json=registration())
    steps = [{"step": n, "seconds": [0.1] * 4} for n in range(250)]
    client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps})
    response = client.get(f"{JOB}/export.json")
    lines = response.text.splitlines()
    assert sum(line.startswith('    {"trial":0,"step":') for line in lines) == 250
    assert "Content-Length" not in response.headers
    assert len(json.loads(response.text)["observations"]) == 250


def test_trials_are_listed_without_the_tensors(app: Flask, store: Store) -> None:
    client = app.test_client()
    client.put(JOB, json=registration())
    with counting() as statements:
        assert client.get(f"{JOB}/trials.csv").text.startswith("index,bucket_bytes,")
    assert statements
    assert not any("tensors" in statement for statement in statements)


def test_what_a_rank_says_is_no_formula_in_a_spreadsheet(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    told = {"kind": "disagreement", "trial": 0, "message": '=HYPERLINK("http://x")\n,"'}
    client.post(f"{JOB}/events", json=told)
    (row, *_) = csv.DictReader(io.StringIO(client.get(f"{JOB}/trials.csv").text))
    assert row["failure"].startswith("'=HYPERLINK")
    assert "\n" not in row["failure"]


@pytest.mark.parametrize(
    ("told", "word"),
    [
        ({"compute_seconds": [0.1] * 3}, "compute_seconds has 3 values, seconds has 4"),
        ({"compute_seconds": [0.1] * 3 + [-0.1]}, "compute_seconds.3"),
        ({"compute_seconds": [0.1] * 3 + [1e999]}, "compute_seconds.3"),
        ({"compute_seconds": [0.1] * 3 + [None]}, "compute_seconds.3"),
        ({"compute_seconds": [0.1] * 3 + [2.5]}, "rank 3 computed for 2.5 s in a step of 0.1 s"),
        *(({"complexity": bad}, "complexity") for bad in (-1.0, 1e999, 1e30, "many", [1.0] * 4)),
    ],
)
def test_bad_computing_times_and_complexities_are_refused(
    client: FlaskClient, told: dict[str, Any], word: str
) -> None:
    client.put(JOB, json=registration())
    steps = [{"step": 1, "seconds": [0.1] * 4, **told}]
    response = client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps})
    assert_problem(response, 422, word)
    assert client.get(f"{JOB}/observations").get_json()["observations"] == []


def test_computing_times_and_complexities_come_back_and_need_not_be_told(
    client: FlaskClient,
) -> None:
    client.put(JOB, json=registration())
    more = {"compute_seconds": [0.0, 0.01, 0.1005, 0.02], "complexity": 120}
    told = {"step": 1, "seconds": [0.1] * 4, **more}
    silent = {"step": 2, "seconds": [0.1] * 4}
    client.post(f"{JOB}/observations", json={"trial": 0, "steps": [told, silent]})
    stored = client.get(f"{JOB}/observations").get_json()["observations"]
    assert [{name: found[name] for name in more} for found in stored] == [
        more, dict.fromkeys(more)
    ]  # fmt: skip
    figures = client.get(f"{JOB}/overview").get_json()["job"]["figures"]
    assert figures["slowest_rank"] == 2
    assert figures["exposed_seconds"] == 0.0  # beyond the step only by the clocks' rounding


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
def listed(client: FlaskClient) -> FlaskClient:
    client.put(JOB, json=registration())
    drive(client, Ranks(seed=1, noise=0.01))
    for step in range(5):
        client.post(f"{JOB}/events", json={"kind": "note", "step": step, "message": "said"})
    return client


@pytest.mark.parametrize("name", ["trials", "observations", "events"])
def test_pages_together_are_the_whole_list(listed: FlaskClient, name: str) -> None:
    whole = listed.get(f"{JOB}/{name}").get_json()
    assert whole["next"] is None
    assert len(whole[name]) > 4
    parts = read_all(listed, f"{JOB}/{name}", name, 3)
    assert [item for part in parts for item in part] == whole[name]
    assert {len(part) for part in parts[:-1]} == {3}
    # A last page that is full has nothing behind it.
    assert len(read_all(listed, f"{JOB}/{name}", name, len(whole[name]))) == 1


def test_a_trials_observations_have_pages_too(listed: FlaskClient) -> None:
    path = f"{JOB}/observations?trial=1"
    whole = listed.get(path).get_json()["observations"]
    first = listed.get(f"{path}&limit=2").get_json()
    rest = listed.get(f"{path}&after={first['next']}").get_json()
    assert first["observations"] + rest["observations"] == whole
    assert rest["next"] is None


def test_nothing_is_read_twice_while_more_is_written(listed: FlaskClient) -> None:
    first = listed.get(f"{JOB}/events?limit=4").get_json()
    listed.post(f"{JOB}/events", json={"kind": "note", "message": "new"})
    rest = listed.get(f"{JOB}/events?after={first['next']}").get_json()["events"]
    assert first["events"] + rest == listed.get(f"{JOB}/events").get_json()["events"]


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


def test_many_ranks_make_pages_short(listed: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "MOST_VALUES", 12)
    page = listed.get(f"{JOB}/observations").get_json()
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
