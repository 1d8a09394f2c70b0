"""``/api/v1`` on the wire: Bagua's fields and statuses, and 4xx sentences for anything else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store

pytestmark = pytest.mark.slow

MIB = 1024**2
TENSORS = [
    {"name": "h", "num_elements": MIB, "dtype": "f16"},
    {"name": "w", "num_elements": 3 * MIB, "dtype": "f32"},
    {"name": "n", "num_elements": 1, "dtype": "i64"},
    {"name": "b", "num_elements": 8, "dtype": "u8"},
]
BASELINE = {
    "buckets": [[TENSORS[0]], [TENSORS[1]], [TENSORS[2]], [TENSORS[3]]],
    "bucket_size": 10 * MIB,
    "is_hierarchical_reduce": False,
}
REGISTER = {"model_name": "net", "tensor_list": TENSORS, "whether_to_bucket": True}
REPORT = {
    "model_name": "net",
    "rank": 0,
    "train_iter": 100,
    "hyperparameters": BASELINE,
    "speed": 1.5,
}
ASK = {"model_name": "net", "rank": 0, "train_iter": 100}
SPAN = {
    "trace_id": 2**128 - 1,
    "action": "tensor_ready",
    "tensor_name": "w",
    "start_time": 2**127,
    "end_time": 2**127 + 1,
}
SPANS = {"spans": [SPAN]}
MESSAGES: dict[str, dict[str, Any]] = {
    "register_tensors": REGISTER,
    "report_metrics": REPORT,
    "ask_hyperparameters": ASK,
    "report_tensor_execution_order": SPANS,
}
ASKED = {"recommended_hyperparameters": BASELINE, "is_autotune_completed": False}


def client_of(**given: Any) -> Iterator[FlaskClient]:
    chosen = Settings.load({}, database="sqlite://", world_size=2, **given)
    store = Store(chosen.database)
    yield create_app(chosen, store).test_client()
    store.close()


@pytest.fixture
def client() -> Iterator[FlaskClient]:
    yield from client_of()


def post(client: FlaskClient, route: str, body: Any) -> Any:
    """As Bagua's workers send it, whose bodies are all declared as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body)
    return client.post(f"/api/v1/{route}", data=data, content_type="application/json")


def assert_refused(response: Any, *statuses: int) -> str:
    assert response.status_code in statuses
    detail = response.get_json(force=True)["detail"]
    assert detail.endswith(".")
    return str(detail)


def test_a_worker_s_requests_are_answered_as_bagua_answers_them(client):
    response = post(client, "register_tensors", REGISTER)
    assert (response.status_code, response.json) == (200, {"recommended_hyperparameters": BASELINE})
    response = post(client, "ask_hyperparameters", {**ASK, "train_iter": 0})
    assert (response.status_code, response.json) == (200, ASKED)
    response = post(client, "report_metrics", REPORT)
    assert (response.status_code, response.json) == (200, {})
    response = post(client, "report_tensor_execution_order", SPANS)
    assert (response.status_code, response.json) == (200, {})
    response = client.get("/api/v1/health_check")
    assert (response.status_code, response.json) == (200, {"status": "ok"})


def test_whether_to_bucket_is_optional_and_false_means_one_bucket_per_dtype(client):
    answer = post(
        client, "register_tensors", {k: REGISTER[k] for k in ("model_name", "tensor_list")}
    )
    assert answer.json["recommended_hyperparameters"]["bucket_size"] == 10 * MIB
    unbucketed = {**REGISTER, "model_name": "other", "whether_to_bucket": False}
    answer = post(client, "register_tensors", unbucketed).json["recommended_hyperparameters"]
    assert answer["bucket_size"] == 10 * 1024**5
    assert len(answer["buckets"]) == 4


@pytest.mark.parametrize(
    ("route", "message"), [("report_metrics", REPORT), ("ask_hyperparameters", ASK)]
)
def test_a_model_that_never_registered_is_answered_405(client, route, message):
    assert "register_tensors" in assert_refused(post(client, route, message), 405)


@pytest.mark.parametrize("speed", [0, -3, -1.5e300, 5e-324, 1.7e308, 10**30])
def test_any_finite_speed_is_taken(client, speed):
    post(client, "register_tensors", REGISTER)
    assert post(client, "report_metrics", {**REPORT, "speed": speed}).status_code == 200


@pytest.mark.parametrize(
    "speed", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"fast"', b"true", b"null", b"[1]"]
)
def test_any_other_speed_is_refused(client, speed):
    post(client, "register_tensors", REGISTER)
    body = json.dumps({**REPORT, "speed": "SPEED"}).encode().replace(b'"SPEED"', speed)
    assert_refused(post(client, "report_metrics", body), 400, 422)


@pytest.mark.parametrize(
    ("route", "change", "field"),
    [
        ("register_tensors", {"model_name": ""}, "model_name"),
        ("register_tensors", {"model_name": "  "}, "model_name: holds nothing but blanks"),
        ("ask_hyperparameters", {"model_name": "  "}, "model_name: holds nothing but blanks"),
        ("report_metrics", {"model_name": "  "}, "model_name: holds nothing but blanks"),
        ("register_tensors", {"tensor_list": []}, "tensor_list"),
        ("register_tensors", {"tensor_list": [TENSORS[0]] * 2}, "tensor_list"),
        ("register_tensors", {"tensor_list": [{**TENSORS[0], "dtype": "f64"}]}, "dtype"),
        ("register_tensors", {"tensor_list": [{**TENSORS[0], "num_elements": -1}]}, "num_elements"),
        ("register_tensors", {"whether_to_bucket": "yes"}, "whether_to_bucket"),
        ("report_metrics", {"rank": 2}, "rank"),
        ("report_metrics", {"rank": -1}, "rank"),
        ("report_metrics", {"rank": True}, "rank"),
        ("report_metrics", {"train_iter": 1.5}, "train_iter"),
        ("report_metrics", {"hyperparameters": []}, "hyperparameters"),
        ("ask_hyperparameters", {"rank": 2}, "rank"),
        ("ask_hyperparameters", {"train_iter": 2**70}, "train_iter"),
        ("report_tensor_execution_order", {"spans": {}}, "spans"),
        (
            "report_tensor_execution_order",
            {"spans": [{**SPAN, "start_time": 2**128}]},
            "start_time",
        ),
        ("report_tensor_execution_order", {"spans": [{"tensor_name": "w"}]}, "trace_id"),
    ],
)
def test_bad_fields_are_named(client, route, change, field):
    post(client, "register_tensors", REGISTER)
    assert field in assert_refused(post(client, route, {**MESSAGES[route], **change}), 422)


@pytest.mark.parametrize("route", MESSAGES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"\xff"', b"[" * 100_000, b'{"model_name": "\\ud800"}']
)
def test_what_is_not_json_of_the_right_shape_is_refused(client, route, body):
    assert_refused(post(client, route, body), 400, 413, 422)


def test_no_v2_job_can_take_the_id_that_a_model_gets(client):
    ids = []
    for service in ([client], client_of()):
        for each in service:
            post(each, "register_tensors", REGISTER)
            ids.append(each.get("/api/v2/jobs").json["jobs"][0]["id"])
    assert ids[0] != ids[1]


def test_spans_of_tensors_that_nobody_registered_are_ignored(client):
    spans = {"spans": [{**SPAN, "tensor_name": f"t{i}"} for i in range(1000)]}
    assert post(client, "report_tensor_execution_order", spans).json == {}
    assert post(client, "register_tensors", REGISTER).status_code == 200


def test_a_token_is_wanted_where_one_is_set():
    for client in client_of(token="secret"):
        assert_refused(post(client, "register_tensors", REGISTER), 401)
        response = client.post(
            "/api/v1/register_tensors", json=REGISTER, headers={"Authorization": "Bearer secret"}
        )
        assert response.status_code == 200
