"""Whatever is sent: never a 500, never a traceback, and nothing stored is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask import Flask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.api.driving import settle
from tests.autotune.api.garbage import TENSORS, Request, requests
from tests.autotune.support import registration


def odd(draw: Any) -> dict[str, Any]:
    """Knobs that may be valid, of kinds that nobody uses."""
    names = st.sampled_from(["bucket_bytes", "hierarchical", "channels", "buckets", "n"])
    sizes = st.integers(1, 2**53)
    choices = st.text(max_size=5) | st.integers(0, 9)
    knobs: dict[str, Any] = {}
    default: dict[str, Any] = {}
    for name in draw(st.lists(names, unique=True, min_size=1)):
        kind = draw(st.sampled_from(["log_integer", "categorical", "partition"]))
        if kind == "partition":
            knobs[name] = {"type": "partition"}
            default[name] = draw(st.just([]) | st.just([250]) | st.lists(st.integers(-1, 250)))
        elif kind == "log_integer":
            low, high = sorted((draw(sizes), draw(sizes)))
            knobs[name] = {"type": "log_integer", "low": low, "high": high}
            default[name] = draw(st.integers(low, high))
        else:
            values = draw(st.lists(choices, min_size=1, max_size=4, unique=True))
            knobs[name] = {"type": "categorical", "values": values}
            default[name] = draw(st.sampled_from(values))
    return registration(knobs=knobs, default_configuration=default)


REGISTRATION = registration(tensors=registration()["tensors"][:TENSORS])


@pytest.fixture
def kept(app: Flask) -> Any:
    client = app.test_client()
    client.put("/api/v2/jobs/job", json=REGISTRATION)
    steps = [{"step": step, "seconds": [0.1] * 4} for step in range(4)]
    client.post("/api/v2/jobs/job/observations", json={"trial": 0, "steps": steps})
    return steps


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=requests(REGISTRATION))
def test_garbage_is_refused_or_taken_but_never_breaks(
    app: Flask, kept: Any, request: Request
) -> None:
    client = app.test_client()
    response = client.open(
        request.path, method=request.method, data=request.body, content_type="application/json"
    )
    assert response.status_code < 500, response.text
    assert "Traceback (most" not in response.text
    if response.status_code >= 400:
        problem = json.loads(response.data)
        assert problem["status"] == response.status_code
        assert problem["detail"]
    stored = client.get("/api/v2/jobs/job/observations?trial=0").get_json()["observations"]
    assert [{key: o[key] for key in ("step", "seconds")} for o in stored[:4]] == kept


@given(body=st.composite(odd)())
@pytest.mark.slow
def test_odd_knobs_are_refused_or_work(body: dict[str, Any]) -> None:
    store = Store("sqlite://")
    client = create_app(Settings(database="sqlite://"), store).test_client()
    job = "/api/v2/jobs/odd"
    response = client.put(job, json=body)
    assert response.status_code in (201, 422), response.text
    if response.status_code == 201 and response.get_json()["trial"]:
        steps = [{"step": step, "seconds": [0.1] * 4} for step in range(30)]
        observed = client.post(f"{job}/observations", json={"trial": 0, "steps": steps})
        state = settle(client, observed.get_json(), job)
        assert state["state"] == "finished" or state["trial"]["index"] == 1
    for path in ("/api/v2/jobs", "/metrics"):
        assert client.get(path).status_code == 200
    store.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.text(max_size=40), query=st.text(max_size=20))
def test_no_path_breaks_the_service(app: Flask, path: str, query: str) -> None:
    client = app.test_client()
    for prefix in ("/", "/api/v2/jobs/", "/api/v2/jobs/job/observations"):
        try:
            response = client.get(prefix + path, query_string={"trial": query, "limit": query})
        except ValueError:
            continue  # not a URL that could be sent
        assert response.status_code < 500, response.text
