"""Large bodies: refused early, with little work and memory, whatever is wrong with them."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from pydantic import BaseModel, ValidationError

from bagua_autotune.api import reports
from bagua_autotune.api.bodies import (
    BOUNDS,
    MOST_ERRORS_BUILT,
    MOST_MEMBERS,
    USUAL,
    Bounds,
)
from bagua_autotune.api.openapi import document
from bagua_autotune.model.job import MOST_TENSORS
from bagua_autotune.model.received import TrialProfile
from tests.autotune.api.driving import assert_problem
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
    assert_problem(response, 422, "should have at most")


def test_very_many_errors_are_counted_and_not_built(client: FlaskClient) -> None:
    unknown = {f"a{number}": 0 for number in range(MOST_MEMBERS - 10)}
    knobs = {f"k{number}": {"type": "partition", **unknown} for number in range(5)}
    response = client.put("/api/v2/jobs/job", json=registration(knobs=knobs))
    assert response.status_code == 422
    detail = response.get_json(force=True)["detail"]
    count = int(detail.partition(" ")[0])
    assert count > MOST_ERRORS_BUILT
    assert detail == f"{count} fields are wrong or unknown."


# Another protocol may have added its own.
OWN = [rule for rule in BOUNDS if rule.startswith("/api/v2/")]
ELEMENTS = ("[]", '{"":0}')


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", [*OWN, "/api/v2/jobs/<job_id>/events"])
def test_what_would_grow_when_parsed_is_refused_with_little_memory(
    client: FlaskClient, element: str, rule: str
) -> None:
    """Such a body of 16 MiB took 25 s and 3.3 GiB."""
    client.put("/api/v2/jobs/job", json=registration())
    assert_refused_with_little_memory(client, element, rule)


def assert_refused_with_little_memory(client: FlaskClient, element: str, rule: str) -> None:
    many = 8 * MOST_TENSORS // (len(element) + 1) * 2
    listed = b'{"tensors":[],"software":{"a":[' + b",".join([element.encode()] * many) + b"]}}"
    inner = b",".join(b'"%x":0' % number for number in range(MOST_MEMBERS * 16))
    path, way = rule.replace("<job_id>", "job"), "PUT" if rule.endswith("<job_id>") else "POST"
    for body in (listed, b'{"software":{' + inner + b"}}"):
        tracemalloc.start()
        response = client.open(path, method=way, data=body, content_type="application/json")
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert response.status_code in (413, 422)
        assert len(response.data) < 1000
        # Without the count of containers it is 22 to 80 times.
        assert peak_bytes < 16 * len(body)


@pytest.mark.parametrize("rule", OWN)
def test_what_real_jobs_send_is_well_inside_the_bounds(rule: str) -> None:
    """10,000 tensors, or 32 steps of 1,000 ranks, with names as long as they come."""
    name = "module.encoder.layers.11.attention.self.query.weight"
    tensor = {"name": name, "elements": 2**26, "bytes": 2**28, "dtype": "torch.bfloat16"}
    step = {"step": 10**6, "seconds": [0.12345678901234567] * 1000}
    bucket = {"bytes": 2**25, "started_seconds": 0.123456789, "ended_seconds": 0.234567891}
    sent: dict[str, Any] = {
        "/api/v2/jobs/<job_id>": [{**tensor, "group": "torch.bfloat16 cuda:0"}] * 10_000,
        "/api/v2/copies": [{**tensor, "group": "torch.bfloat16 cuda:0"}] * 10_000,
        "/api/v2/jobs/<job_id>/observations": [{**step, "compute_seconds": step["seconds"]}] * 32,
        "/api/v2/jobs/<job_id>/profiles": [bucket] * 10_000 + [0.123456789] * 10_000,
    }
    assert_well_inside(sent[rule], BOUNDS[rule])


def assert_well_inside(body: Any, bounds: Bounds) -> None:
    text = json.dumps(body)
    assert len(text) < bounds.bytes / 2
    assert sum(map(text.count, "[{")) < bounds.containers / 2
    assert sum(map(text.count, "[{,:")) < bounds.marks / 2


def test_a_body_is_refused_by_the_length_that_its_route_has(client: FlaskClient) -> None:
    client.put("/api/v2/jobs/job", json=registration())
    body = b'{"kind":"note","message":"' + b"x" * USUAL.bytes + b'"}'
    response = client.post("/api/v2/jobs/job/events", data=body, content_type="application/json")
    assert_problem(response, 413, f"exceeds {USUAL.bytes}")


def documented_bounds() -> dict[str, tuple[int, ...]]:
    """By the route, of the table in the page on the API."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    table = page.partition("\n## Limits\n")[2].partition("\n\nMore is")[0]
    found = {}
    for row in table.strip().splitlines()[2:]:
        body, length, *counts = (cell.strip() for cell in row.strip("|").split("|"))
        size, unit = length.split()
        numbers = [int(count.replace(",", "")) for count in counts]
        for name in re.findall(r"[/\w]+(?=`)", body) or ["all else"]:
            found[name] = (int(size) * {"KiB": 1024, "MiB": MIB}[unit], *numbers)
    return found


def test_the_documentation_has_the_bounds_of_each_route() -> None:
    bounds = {**{rule: BOUNDS[rule] for rule in OWN}, "all else": USUAL}
    documented = documented_bounds().items()
    assert {rule: each for rule, each in documented if rule.startswith(("/api/v2", "all"))} == {
        rule.replace("<job_id>", "ID"): tuple(each) for rule, each in bounds.items()
    }


def test_what_takes_a_body_is_described_to_refuse_some() -> None:
    for path, methods in document()["paths"].items():
        for operation in methods.values():
            refusals = {"411", "413", "415"} & set(operation["responses"])
            assert len(refusals) == (3 if "requestBody" in operation else 0)
            assert ("503" in operation["responses"]) == (path != "/api/v2/openapi.json")


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
    assert_problem(response, 422, "9216 combinations of knobs for 20000 tensors")
    assert_problem(response, 422, "at most 7500")


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


@pytest.mark.parametrize(("method", "path"), WITH_ID)
@pytest.mark.parametrize("job_id", ["a%00", "a b", "a%0a", "x" * 65])
def test_ids_are_checked_on_every_route(
    client: FlaskClient, method: str, path: str, job_id: str
) -> None:
    """A NUL is nothing that PostgreSQL could look for."""
    response = client.open(path.format(job_id=job_id), method=method, json={})
    assert_problem(response, 422, "[A-Za-z0-9_-]{1,64}")


@pytest.mark.parametrize("name", ["a\0", "\x1b[2J", "x" * 201])
def test_names_are_checked_where_they_are_looked_for(client: FlaskClient, name: str) -> None:
    assert_problem(client.get("/api/v2/jobs", query_string={"name": name}), 422, "name: ")
