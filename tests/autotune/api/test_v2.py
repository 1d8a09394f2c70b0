from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.api.driving import JOB, assert_problem, drive, settle
from tests.autotune.support import MIB, Ranks, registration

BASELINE = {"bucket_bytes": 25 * MIB, "hierarchical": "off"}
BUCKET = {"bytes": 40_000_000, "started_seconds": 0.1, "ended_seconds": 0.25}
PROFILE = {
    "trial": 0,
    "step": 7,
    "step_seconds": 0.3,
    "ready_seconds": [0.1, 0.2] * 125,
    "buckets": [BUCKET, {"bytes": 60_000_000, "started_seconds": 0.2, "ended_seconds": 0.3}],
}
STEPS = [{"step": step, "seconds": [0.1] * 4} for step in range(1, 5)]


@pytest.fixture
def registered(client: FlaskClient) -> FlaskClient:
    assert client.put(JOB, json=registration()).status_code == 201
    return client


def test_a_registered_job_is_told_to_run_the_baseline(client: FlaskClient) -> None:
    response = client.put(JOB, json=registration())
    assert response.status_code == 201
    state = response.get_json()
    assert state["trial"] == {
        "index": 0,
        "purpose": "search",
        "state": "proposed",
        "configuration": BASELINE,
    }
    assert (state["id"], state["name"], state["state"]) == ("job", "digits", "tuning")
    assert (state["configuration"], state["result"]) == (BASELINE, None)
    assert (state["round"], state["deciding"]) == (0, False)
    assert client.put(JOB, json=registration()).status_code == 200
    assert_problem(client.put(JOB, json=registration(name="other")), 409, "other content")


def test_a_whole_tuning_over_http(registered: FlaskClient) -> None:
    state = drive(registered, Ranks(seed=1, noise=0.03))
    assert (state["state"], state["trial"]) == ("finished", None)
    result = state["result"]
    assert result["kept"] == "winner"
    assert result["configuration"] == state["configuration"]
    assert 1 < result["low"] <= result["speedup"] <= result["high"]
    trials = registered.get(f"{JOB}/trials").get_json()["trials"]
    assert trials[0]["configuration"] == BASELINE
    assert {trial["round"] for trial in trials} == {0}
    assert {"cost_steps", "cost_seconds", "payback_steps"} <= set(result)
    assert {trial["purpose"] for trial in trials} == {"search", "confirm"}
    assert all(t["low"] <= t["seconds"] <= t["high"] for t in trials)
    stored = registered.get(f"{JOB}/observations").get_json()["observations"]
    assert len(stored) == result["steps"]
    one = registered.get(f"{JOB}/observations?trial=1").get_json()["observations"]
    assert {observation["trial"] for observation in one} == {1}
    assert len(one[0]["seconds"]) == 4


def test_a_drift_opens_a_round_once_however_often_it_is_sent(registered: FlaskClient) -> None:
    ranks = Ranks(seed=1, noise=0.01)
    first = drive(registered, ranks)
    drift = {"kind": "drift", "step": 10**6, "seconds": 0.5, "message": "steps take 0.5 s"}
    state = settle(registered, registered.post(f"{JOB}/events", json=drift).get_json())
    assert (state["state"], state["round"], state["result"]) == ("tuning", 1, first["result"])
    assert registered.post(f"{JOB}/events", json=drift).get_json()["round"] == 1
    drive(registered, ranks)
    rounds = [trial["round"] for trial in registered.get(f"{JOB}/trials").get_json()["trials"]]
    assert (rounds, set(rounds)) == (sorted(rounds), {0, 1})
    again = registered.post(f"{JOB}/events", json=drift).get_json()
    assert (again["state"], again["round"]) == ("finished", 1)
    events = registered.get(f"{JOB}/events").get_json()["events"]
    assert sum(event["kind"] == "drift" for event in events) == 1


def test_everything_about_a_job_can_be_read_back(client: FlaskClient) -> None:
    body = registration(software={"torch": "2.13.0"}, limits={"max_samples": 9})
    client.put(JOB, json=body)
    detail = client.get(JOB).get_json()
    for key in ("tensors", "knobs", "default_configuration", "fingerprint", "software"):
        assert detail[key] == body[key]
    assert detail["limits"] == {
        "max_samples": 9,
        "trial_seconds": 5.0,
        "warmup_seconds": 30.0,
        "remaining_steps": 10_000,
        "max_rounds": 10,
        "max_seconds": None,
    }
    assert (detail["protocol"], detail["ended_at"]) == ("v2", None)


def test_profiles_are_kept_once_and_few_of_a_trial(registered: FlaskClient) -> None:
    profiles = f"{JOB}/profiles"
    for step in (7, 7, *range(10, 20)):
        response = registered.post(profiles, json={**PROFILE, "step": step})
        assert response.status_code == 200
        assert response.get_json()["trial"]["index"] == 0
    stored = registered.get(profiles).get_json()["profiles"]
    assert stored[0] == {**PROFILE, "gathers": []}
    assert [profile["step"] for profile in stored] == [7, 10, 11, 12, 13]
    assert registered.get(f"{profiles}?trial=0").get_json()["profiles"] == stored
    assert_problem(registered.get(f"{profiles}?trial=1"), 409, "no trial 1")
    assert_problem(registered.get(f"{profiles}?trial=x"), 422, "trial")


def test_knobs_may_be_numbers_and_lists_of_buckets(client: FlaskClient) -> None:
    body = registration()
    body["knobs"] |= {
        "channels": {"type": "categorical", "values": [1, 2, 4]},
        "buckets": {"type": "partition"},
    }
    body["default_configuration"] |= {"channels": 2, "buckets": [100, 150]}
    state = client.put(JOB, json=body).get_json()
    assert state["configuration"] == body["default_configuration"]
    detail = client.get(JOB).get_json()
    assert detail["knobs"] == body["knobs"]
    assert detail["default_configuration"] == body["default_configuration"]
    (trial,) = client.get(f"{JOB}/trials").get_json()["trials"]
    assert trial["configuration"] == body["default_configuration"]
    assert client.put(JOB, json=body).status_code == 200


def test_events_are_kept_and_acted_on(registered: FlaskClient) -> None:
    events = f"{JOB}/events"
    switched = {"kind": "switched", "trial": 0, "step": 7, "seconds": 0.02}
    assert registered.post(events, json=switched).get_json()["trial"]["state"] == "running"
    disagreed = {"kind": "disagreement", "trial": 0, "step": 9, "message": "rank 2 differs"}
    state = settle(registered, registered.post(events, json=disagreed).get_json())
    assert state["trial"]["index"] == 1
    assert registered.post(events, json={"kind": "ended"}).get_json()["state"] == "ended"
    stored = registered.get(events).get_json()["events"]
    assert [event["kind"] for event in stored] == ["switched", "disagreement", "ended"]
    failed = registered.get(f"{JOB}/trials").get_json()["trials"][0]
    assert (failed["state"], failed["failure"]) == ("failed", "rank 2 differs")
    assert registered.put(JOB, json=registration()).get_json()["state"] == "tuning"


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(body: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        target: Any = body
        for part in parents:
            target = target[int(part) if part.isdigit() else part]
        target[int(last) if last.isdigit() else last] = value

    return apply


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("name", "", "name"),
        ("name", "a\nb", "name"),
        ("name", "  ", "name: holds nothing but blanks."),
        ("name", 5, "name"),
        ("world_size", 3, "ranks_per_node sums to 4"),
        ("world_size", "4", "world_size"),
        ("world_size", True, "world_size"),
        ("ranks_per_node", [], "ranks_per_node"),
        ("tensors", [], "tensors"),
        ("tensors.1.name", "layer0.weight", "twice"),
        ("tensors.1.name", "a\x00", "NUL"),
        ("tensors.0.bytes", -1, "tensors.0.bytes"),
        ("tensors.0.bytes", 10**30, "tensors.0.bytes"),
        ("knobs", {}, "knobs"),
        ("knobs.bucket_bytes.low", 2**31, "above high"),
        (
            "knobs",
            {
                "bucket_bytes": {"type": "log_integer", "low": 5, "high": 5},
                **{f"k{i}": {"type": "categorical", "values": list("abcd")} for i in range(15)},
            },
            "combinations",
        ),
        ("knobs.hierarchical.type", "fuzzy", "knobs.hierarchical"),
        ("knobs.hierarchical.values", ["off", "\x1b[31m"], "cannot be printed"),
        ("knobs.hierarchical.values", ["off", 1.5], "knobs.hierarchical"),
        ("knobs.hierarchical.values", [1, 2, 1], "twice"),
        ("knobs.hierarchical.values", [True, "off"], "knobs.hierarchical"),
        ("knobs.hierarchical.values", ["off", -1], "knobs.hierarchical"),
        ("knobs.hierarchical", {"type": "partition", "low": 1}, "knobs.hierarchical"),
        ("knobs", {"bucket_bytes": {"type": "categorical", "values": ["a"]}}, "log_integer"),
        ("knobs", {"n": {"type": "log_integer", "low": 1, "high": 9}}, "bucket_bytes is needed"),
        ("knobs.channels", {"type": "categorical", "values": [0, 1]}, "numbers from 1 on"),
        ("knobs.channels", {"type": "categorical", "values": ["1", "2"]}, "numbers from 1 on"),
        ("knobs.channels", {"type": "log_integer", "low": 1, "high": 8}, "numbers from 1 on"),
        ("knobs.first_bucket_bytes", {"type": "categorical", "values": ["0"]}, "numbers from 0"),
        ("knobs.last_bucket_bytes", {"type": "log_integer", "low": 1, "high": 9}, "last_bucket"),
        ("knobs.channels", {"type": "categorical", "values": [1, "many"]}, "numbers from 1 on"),
        ("knobs.channels", {"type": "partition"}, "numbers from 1 on"),
        ("knobs.hierarchical", {"type": "log_integer", "low": 1, "high": 8}, "categorical"),
        ("knobs.wire_precision", {"type": "log_integer", "low": 1, "high": 8}, "categorical"),
        ("knobs.cuts", {"type": "partition"}, "named buckets"),
        ("knobs.buckets", {"type": "categorical", "values": ["all"]}, "named buckets"),
        ("default_configuration.bucket_bytes", 1, "bucket_bytes"),
        ("default_configuration.channels", 1, "channels"),
        ("default_configuration.hierarchical", 1, "hierarchical"),
        ("default_configuration.hierarchical", [1], "hierarchical"),
        ("fingerprint", "x" * 129, "fingerprint"),
        ("limits", {"trial_seconds": 1e999}, "trial_seconds"),
        ("surprise", 1, "surprise"),
    ],
)
def test_a_bad_registration_is_refused_by_the_field(
    client: FlaskClient, path: str, value: Any, word: str
) -> None:
    body = registration()
    change(path, value)(body)
    assert_problem(client.put(JOB, json=body), 422, word)
    assert client.get(JOB).status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"trial": 0, "steps": [{"step": 1, "seconds": [0.1, 0.1]}]}, 422, "world size is 4"),
        ({"trial": 0, "steps": [{"step": 1, "seconds": [0.1, 0.1, 0.1, 0]}]}, 422, "seconds.3"),
        ({"trial": 0, "steps": [{"step": 1, "seconds": [0.1] * 3 + [1e999]}]}, 422, "seconds.3"),
        ({"trial": 0, "steps": [*STEPS, STEPS[0]]}, 422, "1 follows 4"),
        ({"trial": 0, "steps": [STEPS[0], STEPS[0]]}, 422, "increase"),
        ({"trial": 0, "steps": [{"step": -1, "seconds": [0.1] * 4}]}, 422, "steps.0.step"),
        ({"trial": 0}, 422, "steps"),
        ({"trial": 5, "steps": STEPS}, 409, "no trial 5"),
        ({"trial": 2**70, "steps": []}, 422, "trial"),
        ([], 422, "body"),
    ],
)
def test_bad_observations_are_refused_and_nothing_of_them_is_stored(
    registered: FlaskClient, body: Any, status: int, word: str
) -> None:
    assert_problem(registered.post(f"{JOB}/observations", json=body), status, word)
    assert registered.get(f"{JOB}/observations").get_json()["observations"] == []


@pytest.mark.parametrize(
    ("path", "value", "status", "word"),
    [
        ("trial", 5, 409, "no trial 5"),
        ("trial", "0", 422, "trial"),
        ("trial", -1, 422, "trial"),
        ("step", 2**60, 422, "step"),
        ("step_seconds", -0.1, 422, "step_seconds"),
        ("step_seconds", 1e10, 422, "step_seconds"),
        ("ready_seconds", [0.1] * 249, 422, "249 values, the job has 250 tensors"),
        ("ready_seconds", [0.1] * 251, 422, "251 values"),
        ("ready_seconds.3", 1e999, 422, "ready_seconds.3"),
        ("ready_seconds.3", None, 422, "ready_seconds.3"),
        ("buckets", [], 422, "buckets"),
        ("buckets", [BUCKET] * 251, 422, "251 are more than the job's 250 tensors"),
        ("buckets.0.bytes", -1, 422, "buckets.0.bytes"),
        ("buckets.0.bytes", 1.5, 422, "buckets.0.bytes"),
        ("buckets.1.ended_seconds", -1.0, 422, "buckets.1.ended_seconds"),
        ("buckets.1.colour", "red", 422, "buckets.1.colour"),
        ("surprise", 1, 422, "surprise"),
    ],
)
def test_a_bad_profile_is_refused_by_the_field_and_not_stored(
    registered: FlaskClient, path: str, value: Any, status: int, word: str
) -> None:
    body = copy.deepcopy(PROFILE)
    change(path, value)(body)
    assert_problem(registered.post(f"{JOB}/profiles", json=body), status, word)
    assert registered.get(f"{JOB}/profiles").get_json()["profiles"] == []


def test_bad_events_are_refused(registered: FlaskClient) -> None:
    for body, status, word in (
        ({"kind": "party"}, 422, "kind"),
        ({"kind": "lost"}, 422, "kind"),
        ({"kind": "note", "message": "x" * 2001}, 422, "message"),
        ({"kind": "note", "message": "\x00"}, 422, "NUL"),
        ({"kind": "note", "seconds": -1}, 422, "seconds"),
        ({"kind": "switched", "trial": 0, "seconds": 1.1e9}, 422, "seconds"),
        ({"kind": "switched", "trial": 9}, 409, "no trial 9"),
        ({"kind": "disagreement", "trial": 9}, 409, "no trial 9"),
        ({"kind": "disagreement"}, 422, "must name its trial"),
    ):
        assert_problem(registered.post(f"{JOB}/events", json=body), status, word)
    assert registered.get(f"{JOB}/events").get_json()["events"] == []


def test_what_is_not_there_is_said_in_a_sentence(client: FlaskClient) -> None:
    assert_problem(client.get(JOB), 404, "register it first")
    for kind in ("trials", "observations", "profiles", "events"):
        assert_problem(client.get(f"{JOB}/{kind}"), 404, "'job'")
    empty = {"trial": 0, "steps": []}
    assert_problem(client.post(f"{JOB}/observations", json=empty), 404, "'job'")
    assert_problem(client.get("/nowhere"), 404, "not found")
    wrong_method = client.patch(JOB)
    assert_problem(wrong_method, 405, "not allowed")
    assert "PUT" in wrong_method.headers["Allow"]
    assert_problem(client.put("/api/v2/jobs/a.b", json=registration()), 422, "job id")
    assert_problem(client.put("/api/v2/jobs/" + "a" * 65, json=registration()), 422, "job id")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"name": "\\ud800"}', b"[" * 100_000])
def test_what_is_not_json_is_said_to_be_so(client: FlaskClient, body: bytes) -> None:
    assert_problem(client.put(JOB, data=body, content_type="application/json"), 400, "JSON")


def test_a_copy_is_taken_from_one_service_to_another(client: FlaskClient) -> None:
    client.put("/api/v2/jobs/job", json=registration())
    copy = client.get("/api/v2/jobs/job/copy").get_json()
    assert client.post("/api/v2/copies", json=copy).get_json() == {"jobs": 0}
    other = create_app(Settings(database="sqlite://"), Store("sqlite://")).test_client()
    assert other.post("/api/v2/copies", json=copy).get_json() == {"jobs": 1}
    assert other.get("/api/v2/jobs/job").get_json()["state"] == "lost"
    copy["jobs"][0]["id"] = "no such id"
    answer = other.post("/api/v2/copies", json=copy)
    assert answer.status_code == 422
    assert "id" in answer.get_json()["detail"]
    assert client.get("/api/v2/jobs/none/copy").status_code == 404


def test_a_batch_may_be_sent_twice_and_an_empty_one_polls(registered: FlaskClient) -> None:
    batch = {"trial": 0, "steps": STEPS}
    for _ in range(2):
        state = registered.post(f"{JOB}/observations", json=batch).get_json()
        assert state["trial"]["state"] == "running"
    poll = registered.post(f"{JOB}/observations", json={"trial": 0, "steps": []})
    assert poll.get_json()["trial"] == state["trial"]
    assert len(registered.get(f"{JOB}/observations").get_json()["observations"]) == 4
