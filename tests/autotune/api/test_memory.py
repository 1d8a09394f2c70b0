"""The memory of trials: what the ranks tell of it, what comes of it, and where it is shown."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.autotune.api.driving import JOB, assert_problem, of, scrape, settle
from tests.autotune.support import MIB, Ranks, registration

GIB = 2**30
KNOBS = {
    "bucket_bytes": {"type": "log_integer", "low": 25 * MIB, "high": 25 * MIB},
    "kept_units": {"type": "categorical", "values": [0, 2, 4, 8]},
    "channels": {"type": "categorical", "values": [1, 2]},
}
DEFAULT = {"bucket_bytes": 25 * MIB, "kept_units": 0, "channels": 1}


def seconds(configuration: Any) -> float:
    return 0.2 * math.exp(-0.03 * configuration["kept_units"] - 0.05 * configuration["channels"])


def peak(configuration: Any) -> int:
    return (40 + 4 * configuration["kept_units"]) * GIB


def memory(peak_bytes: int, limit: int = 60, **more: Any) -> dict[str, Any]:
    return {
        "peak_bytes": peak_bytes,
        "limit_bytes": limit * GIB,
        "device_bytes": 80 * GIB,
        **more,
    }


def tuned(client: FlaskClient, limit: int = 60) -> list[dict[str, Any]]:
    """A job whose ranks refuse what takes more than the limit; its trials."""
    client.put(JOB, json=registration(knobs=KNOBS, default_configuration=DEFAULT))
    state, ranks = settle(client, client.get(JOB).get_json()), Ranks(0, 0.002, seconds)
    while state["trial"]:
        index, configuration = state["trial"]["index"], state["configuration"]
        taken = peak(configuration)
        if taken > limit * GIB:
            said = {"kind": "infeasible", "trial": index, "step": ranks.step, "message": "no room"}
            body = {**said, "memory": memory(taken, limit, is_predicted=True)}
            answer = client.post(f"{JOB}/events", json=body)
        else:
            steps = [{"step": n, "seconds": s} for n, s in ranks.run(configuration, 5)]
            body = {"trial": index, "steps": steps, "memory": memory(taken, limit)}
            answer = client.post(f"{JOB}/observations", json=body)
        assert answer.status_code == 200, answer.get_json()
        state = settle(client, answer.get_json())
    trials: list[dict[str, Any]] = client.get(f"{JOB}/trials").get_json()["trials"]
    return trials


def test_the_best_that_fits_is_found_and_nothing_larger_is_asked_for_twice(
    client: FlaskClient,
) -> None:
    trials = tuned(client)
    refused = [trial for trial in trials if trial["state"] == "infeasible"]
    assert {trial["configuration"]["kept_units"] for trial in refused} == {8}
    assert len(refused) == len({str(trial["configuration"]) for trial in refused}) <= 2
    assert {(t["failure"], t["peak_bytes"]) for t in refused} == {("no room", 72 * GIB)}
    assert {trial["state"] for trial in trials} == {"measured", "infeasible"}
    result = client.get(JOB).get_json()["result"]
    assert result["configuration"] == {**DEFAULT, "kept_units": 4, "channels": 2}
    told = (result["default_peak_bytes"], result["peak_bytes"], result["device_bytes"])
    assert told == (40 * GIB, 56 * GIB, 80 * GIB)
    assert result["summary"].endswith("; memory 56 GiB (70 %), by default 40 GiB (50 %)")


def test_it_is_shown(client: FlaskClient) -> None:
    tuned(client)
    overview = client.get(f"{JOB}/overview").get_json()
    figures = overview["job"]["figures"]
    told = {name: figures[name] for name in figures if name.endswith("_bytes")}
    assert told == {
        "default_peak_bytes": 40 * GIB,
        "peak_bytes": 56 * GIB,
        "device_bytes": 80 * GIB,
    }
    said = (
        r"takes 56 GiB .*, 16 GiB more than .* bought [\d.]+ ms of a step for each GiB; 24 GiB are"
    )
    assert re.search(said, overview["why"])
    found = scrape(client)
    assert of(found, "trials")["digits", "infeasible"] >= 1
    assert set(of(found, "trial_failures_total").values()) == {0}
    assert of(found, "baseline_peak_memory_bytes") == {("digits",): 40 * GIB}
    assert of(found, "incumbent_peak_memory_bytes") == {("digits",): 56 * GIB}
    assert of(found, "device_memory_bytes") == {("digits",): 80 * GIB}
    header, first, *_ = client.get(f"{JOB}/trials.csv").text.splitlines()
    assert dict(zip(header.split(","), first.split(","), strict=True))["peak_bytes"] == str(
        40 * GIB
    )


def test_of_all_that_is_told_the_fullest_counts(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    for step, taken in enumerate((3, 5, 4)):
        steps = [{"step": step, "seconds": [0.2] * 4}]
        body = {"trial": 0, "steps": steps, "memory": memory(taken * GIB)}
        assert client.post(f"{JOB}/observations", json=body).status_code == 200
    (trial,) = client.get(f"{JOB}/trials").get_json()["trials"]
    assert (trial["peak_bytes"], trial["device_bytes"]) == (5 * GIB, 80 * GIB)


def test_a_winner_that_no_longer_fits_gives_way_to_the_default(client: FlaskClient) -> None:
    tuned(client)
    said = {"kind": "infeasible", "message": "rank 1 took too much", "step": 9999}
    assert client.post(f"{JOB}/events", json=said).status_code == 200
    result = client.get(JOB).get_json()["result"]
    assert (result["kept"], result["peak_bytes"]) == ("baseline", 40 * GIB)
    assert "the memory did not suffice: rank 1 took too much" in result["summary"]
    assert of(scrape(client), "job_result") == {("digits", "infeasible"): 1}


@pytest.mark.parametrize(
    "wrong", [{}, memory(-1), {**memory(1), "device_bytes": 0}, memory(1, of="rank 3")]
)
def test_what_no_memory_can_be_is_refused(client: FlaskClient, wrong: Any) -> None:
    client.put(JOB, json=registration())
    body = {"trial": 0, "steps": [{"step": 1, "seconds": [0.2] * 4}], "memory": wrong}
    assert_problem(client.post(f"{JOB}/observations", json=body), 422, "memory")
