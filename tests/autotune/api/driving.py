"""A job's rank 0, as far as the API sees it."""

from __future__ import annotations

import time
from typing import Any

from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families
from werkzeug.test import TestResponse

from tests.autotune.support import Ranks

JOB = "/api/v2/jobs/job"


def assert_problem(response: TestResponse, status: int, word: str) -> None:
    """It is refused in the form of all errors, with this word in the sentence."""
    assert response.status_code == status
    assert response.content_type == "application/problem+json"
    body = response.get_json(force=True)
    assert set(body) == {"type", "title", "status", "detail"}
    assert body["status"] == status
    assert word in body["detail"]


def settle(client: FlaskClient, state: dict[str, Any], job: str = JOB) -> dict[str, Any]:
    """The state once nothing is being decided."""
    while state["deciding"]:
        time.sleep(0.005)
        state = client.get(job).get_json()
    return state


def drive(
    client: FlaskClient, ranks: Ranks, steps: int = 5, job: str = JOB, **more: Any
) -> dict[str, Any]:
    """Run what the service says until it says no more; the last state.

    Args:
        more: what is told besides the steps.
    """
    state = settle(client, client.get(job).get_json(), job)
    while state["trial"]:
        found = [
            {"step": step, "seconds": seconds}
            for step, seconds in ranks.run(state["configuration"], steps)
        ]
        body = {"trial": state["trial"]["index"], "steps": found, **more}
        state = settle(client, client.post(f"{job}/observations", json=body).get_json(), job)
    return state


Samples = dict[tuple[str, ...], float]


def parsed(text: str) -> Samples:
    """By the sample's name and its labels' values, in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(client: FlaskClient) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    return parsed(response.text)


def of(samples: Samples, name: str) -> dict[tuple[str, ...], float]:
    """The samples of this name, by the values of their labels."""
    return {key[1:]: value for key, value in samples.items() if key[0] == f"bagua_autotune_{name}"}
