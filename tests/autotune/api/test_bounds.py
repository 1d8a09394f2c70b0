"""Large bodies: refused early, with little work and memory, whatever is wrong with them."""

from __future__ import annotations

import json
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from pydantic import BaseModel, ValidationError

from bagua_autotune.api import reports
from bagua_autotune.api.errors import MOST_ERRORS_BUILT
from bagua_autotune.api.openapi import document
from bagua_autotune.app import LARGEST_BODY_BYTES
from bagua_autotune.bagua import messages
from bagua_autotune.model.profile import TrialProfile
from tests.autotune.server import ServeProcess
from tests.autotune.support import MIB, registration

MANY = 20_000
BAD = ["x"] * MANY
STEP = {"step": 1, "seconds": [0.1] * 4}
PROFILE = {"trial": 0, "step": 1, "step_seconds": 0.1, "ready_seconds": [0.1], "buckets": BAD}
PARTITION = {"bucket_bytes": 25 * MIB, "hierarchical": "off", "buckets": BAD}

WITH_ID = sorted(
    (method.upper(), path)
    for path, methods in document()["paths"].items()
    for method in methods
    if "{job_id}" in path
)


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (reports.Observations, {"trial": 0, "steps": BAD}),
        (reports.Observations, {"trial": 0, "steps": [{**STEP, "seconds": BAD}]}),
        (reports.Observations, {"trial": 0, "steps": [{**STEP, "compute_seconds": BAD}]}),
        (TrialProfile, PROFILE),
        (TrialProfile, {**PROFILE, "ready_seconds": BAD, "buckets": []}),
        (reports.Registration, registration(tensors=BAD)),
        (reports.Registration, registration(ranks_per_node=BAD)),
        (reports.Registration, registration(default_configuration=PARTITION)),
        (messages.RegisterTensors, {"model_name": "m", "tensor_list": BAD}),
        (messages.ReportTensorExecutionOrder, {"spans": BAD}),
    ],
)
def test_of_a_list_the_first_error_is_found_and_no_other(
    message: type[BaseModel], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as found:
        message.model_validate_json(json.dumps(body))
    assert found.value.error_count() < 10


@pytest.mark.parametrize("field", ["knobs", "default_configuration", "software"])
def test_of_a_mapping_that_is_too_large_no_entry_is_looked_at(
    client: FlaskClient, field: str
) -> None:
    entries = {f"a{number}": [] for number in range(MANY)}
    response = client.put("/api/v2/jobs/job", json=registration(**{field: entries}))
    assert response.status_code == 422
    assert "should have at most" in response.get_json(force=True)["detail"]


def test_very_many_errors_are_counted_and_not_built(client: FlaskClient) -> None:
    client.put("/api/v2/jobs/job", json=registration())
    body = {"kind": "note", **{f"a{number}": 0 for number in range(MOST_ERRORS_BUILT + 1)}}
    response = client.post("/api/v2/jobs/job/events", json=body)
    assert response.status_code == 422
    detail = response.get_json(force=True)["detail"]
    assert detail == f"{MOST_ERRORS_BUILT + 1} fields are wrong or unknown."


def test_numbers_without_end_are_refused_with_little_memory(client: FlaskClient) -> None:
    """6 MiB, as were once answered after 20 s with 2.6 GiB."""
    client.put("/api/v2/jobs/job", json=registration())
    body = b'{"trial":0,"steps":[{"step":1,"seconds":[' + b"0," * (3 * MIB) + b"0]}]}"
    tracemalloc.start()
    response = client.post(
        "/api/v2/jobs/job/observations", data=body, content_type="application/json"
    )
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert response.status_code == 422
    assert peak_bytes < 8 * len(body)  # of which the test sends and holds some


def with_combinations(tensors: int) -> dict[str, Any]:
    """That many tensors, and 9,216 combinations of knobs, none of them of the edges."""
    tensor = registration()["tensors"][0]
    more = {
        "channels": {"type": "categorical", "values": [1, 2, 4]},
        "algorithm_of_mine": {"type": "categorical", "values": list(range(16))},
        "other": {"type": "categorical", "values": [0, 1, 2]},
    }
    default = {"channels": 1, "algorithm_of_mine": 0, "other": 0}
    usual = registration()
    return registration(
        tensors=[{**tensor, "name": f"layer{index}"} for index in range(tensors)],
        knobs={**usual["knobs"], **more},
        default_configuration={**usual["default_configuration"], **default},
    )


def test_more_combinations_than_can_be_cut_are_refused_before_a_tensor_is_looked_at(
    client: FlaskClient,
) -> None:
    body = with_combinations(MANY)
    body["tensors"] = BAD  # which nobody sees
    response = client.put("/api/v2/jobs/job", json=body)
    assert response.status_code == 422
    detail = response.get_json(force=True)["detail"]
    assert "9216 combinations of knobs for 20000 tensors" in detail
    assert "at most 7500" in detail


def test_edges_that_are_not_varied_for_so_many_tensors_do_not_count(client: FlaskClient) -> None:
    """This project's own client offers them for every model."""
    usual, tensor = registration(), registration()["tensors"][0]
    edges = {
        f"{edge}_bucket_bytes": {"type": "categorical", "values": [0, MIB, 4 * MIB]}
        for edge in ("first", "last")
    }
    channels = {"channels": {"type": "categorical", "values": [1, 2, 4, 8, 16]}}
    default = {**usual["default_configuration"], **dict.fromkeys(edges, 0), "channels": 1}
    body = registration(
        tensors=[{**tensor, "name": f"layer{index}"} for index in range(60_000)],
        knobs={**usual["knobs"], **edges, **channels},
        default_configuration=default,
    )
    reports.Outline.model_validate_json(json.dumps(body))


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "a.db") as service:
        host, port = service.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = (
                "PUT /api/v2/jobs/job HTTP/1.1\r\nHost: localhost\r\n"
                "Content-Type: application/json\r\n"
                f"Content-Length: {LARGEST_BODY_BYTES + 1}\r\n\r\n"
            )
            connection.sendall(head.encode())
            answer = connection.makefile("rb").readline()
    assert answer.split()[1] == b"413"


@pytest.mark.parametrize(("method", "path"), WITH_ID)
@pytest.mark.parametrize("job_id", ["a%00", "a b", "%ff", "x" * 65, "a%0a"])
def test_ids_are_checked_on_every_route(
    client: FlaskClient, method: str, path: str, job_id: str
) -> None:
    """A NUL is nothing that PostgreSQL could look for."""
    response = client.open(path.format(job_id=job_id), method=method, json={})
    assert response.status_code == 422
    assert "[A-Za-z0-9_-]{1,64}" in response.get_json(force=True)["detail"]


@pytest.mark.parametrize("name", ["a\0", "\x1b[2J", "x" * 201])
def test_names_are_checked_where_they_are_looked_for(client: FlaskClient, name: str) -> None:
    response = client.get("/api/v2/jobs", query_string={"name": name})
    assert response.status_code == 422
    assert response.get_json(force=True)["detail"].startswith("name: ")
    model = {"model_name": name, "tensor_list": [{"name": "t", "num_elements": 1, "dtype": "f32"}]}
    for path, body in (("register_tensors", model), ("ask_hyperparameters", model)):
        assert client.post(f"/api/v1/{path}", json=body).status_code == 422


def test_more_trials_than_a_decision_can_rest_on_are_refused(client: FlaskClient) -> None:
    body = registration(limits={"max_samples": 501})
    response = client.put("/api/v2/jobs/job", json=body)
    assert response.status_code == 422
    detail = response.get_json(force=True)["detail"]
    assert detail == "limits.max_samples: Input should be less than or equal to 500."
