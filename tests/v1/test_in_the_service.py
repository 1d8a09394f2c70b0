"""How the protocol hangs in the service: found by an entry point, bounded like the service's own
routes, and left out without harm; the log that a variable asks for; and replicas, of which a pair
of requests is two statements, and which lose nothing of each other.
"""

from __future__ import annotations

import ast
import csv
import json
import logging
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from pydantic import BaseModel, ValidationError

import bagua_v1
from bagua_autotune.api.bodies import BOUNDS
from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_v1 import routes
from bagua_v1.routes import CsvLog
from tests.autotune.api.driving import assert_problem
from tests.autotune.api.test_bounds import (
    BAD,
    ELEMENTS,
    assert_refused_with_little_memory,
    assert_well_inside,
    documented_bounds,
)
from tests.autotune.api.test_teams import operator, teams_app, vision
from tests.autotune.api.test_v2 import PROFILE
from tests.autotune.support import Ranks, counting, drive, make_spec, registration, stored_jobs
from tests.v1.worker import TENSORS

__all__ = ["operator", "teams_app", "vision"]

HEALTH = "/api/v1/health_check"
OWN = [rule for rule in BOUNDS if rule.startswith("/api/v1/")]
# Of the service it may use these, and never what decides or what is shown.
MAY_IMPORT = {"api", "tuning", "measuring", "model", "store", "settings"}


def test_of_the_service_it_imports_only_what_it_stands_on() -> None:
    found = set()
    for path in Path(str(bagua_v1.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bagua_autotune."):
                found.add(str(node.module).split(".")[1])
    assert found <= MAY_IMPORT


def test_without_it_the_service_runs_and_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class LeftOut(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            if fullname == "bagua_v1":
                raise ModuleNotFoundError(name=fullname)

    for name in [name for name in sys.modules if name.partition(".")[0] == "bagua_v1"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [LeftOut(), *sys.meta_path])
    with caplog.at_level(logging.INFO):
        client = create_app(Settings(database="sqlite://"), store).test_client()
    assert [r.getMessage() for r in caplog.records if "/api/v1" in r.getMessage()] == [
        "Bagua's own protocol, /api/v1, is not served: bagua_v1 is not installed"
    ]
    assert client.get(HEALTH).status_code == 404
    assert client.put("/api/v2/jobs/job", json=registration()).status_code == 201


def test_a_protocol_that_fails_is_not_taken_for_one_that_was_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "bagua_v1.routes")
    monkeypatch.setitem(sys.modules, "bagua_wire.cutting", None)
    monkeypatch.delitem(sys.modules, "bagua_v1.hyperparameters")
    with pytest.raises(ModuleNotFoundError):
        create_app(Settings(database="sqlite://"), store)


def test_it_is_not_for_teams(operator: FlaskClient, vision: FlaskClient) -> None:
    assert_problem(vision.get(HEALTH), 403, "the service's own token")
    assert operator.get(HEALTH).status_code == 200


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (routes.RegisterTensors, {"model_name": "m", "tensor_list": BAD}),
        (routes.ReportTensorExecutionOrder, {"spans": BAD}),
    ],
)
def test_of_a_list_the_first_error_is_found_and_no_other(
    message: type[BaseModel], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as found:
        message.model_validate_json(json.dumps(body))
    assert found.value.error_count() < 10


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", OWN)
def test_what_would_grow_when_parsed_is_refused_with_little_memory(
    client: FlaskClient, element: str, rule: str
) -> None:
    assert_refused_with_little_memory(client, element, rule)


@pytest.mark.parametrize("rule", OWN)
def test_what_real_jobs_send_is_well_inside_the_bounds(rule: str) -> None:
    """10,000 tensors with names as long as they come."""
    name = "module.encoder.layers.11.attention.self.query.weight"
    tensor = {"name": name, "num_elements": 2**26, "dtype": "f32"}
    span = {"trace_id": 2**127, "action": "tensor_ready", "tensor_name": name}
    sent: dict[str, Any] = {
        "/api/v1/register_tensors": [tensor] * 10_000,
        "/api/v1/report_metrics": [[tensor]] * 10_000,
        "/api/v1/report_tensor_execution_order": [{**span, "start_time": 2**61, "end_time": 2**61}]
        * 10_000,
    }
    assert_well_inside(sent[rule], BOUNDS[rule])


def test_the_documentation_has_the_bounds_of_each_route() -> None:
    bounds = {rule: tuple(BOUNDS[rule]) for rule in OWN}
    bounds["/report_tensor_execution_order"] = bounds.pop("/api/v1/report_tensor_execution_order")
    documented = documented_bounds()
    assert {rule: documented[rule] for rule in bounds} == bounds


@pytest.mark.parametrize("name", ["a\0", "\x1b[2J", "x" * 201])
def test_names_are_checked_where_they_are_looked_for(client: FlaskClient, name: str) -> None:
    model = {"model_name": name, "tensor_list": [{"name": "t", "num_elements": 1, "dtype": "f32"}]}
    for path, body in (("register_tensors", model), ("ask_hyperparameters", model)):
        assert client.post(f"/api/v1/{path}", json=body).status_code == 422


def test_jobs_of_bagua_s_own_protocol_have_no_seconds(app: Flask) -> None:
    client = app.test_client()
    tensors = [{"name": f"t{n}", "num_elements": 10**6, "dtype": "f32"} for n in range(9)]
    body = {"model_name": "bagua", "tensor_list": tensors, "whether_to_bucket": True}
    assert client.post("/api/v1/register_tensors", json=body).status_code == 200
    (listed,) = client.get("/api/v2/jobs").get_json()["jobs"]
    path = f"/api/v2/jobs/{listed['id']}"
    for iteration in (0, 100, 200, 300):
        ask = {"model_name": "bagua", "rank": 0, "train_iter": iteration}
        answer = client.post("/api/v1/ask_hyperparameters", json=ask).get_json()
        ran = answer["recommended_hyperparameters"]
        report = {**ask, "hyperparameters": ran, "speed": 10.0 + iteration}
        client.post("/api/v1/report_metrics", json=report)
    found = client.get(f"{path}/overview").get_json()
    figures = found["job"]["figures"]
    assert found["job"]["protocol"] == "v1"
    assert {figures[k] for k in figures if k.endswith("_seconds") and k != "search_seconds"} == {
        None
    }
    assert (found["steps"]["points"], found["best"], found["ranks"]) == ([], [], [])
    assert client.get(f"{path}/curve").get_json()["curves"] == []
    layout = client.get(f"{path}/buckets").get_json()["layouts"][0]
    assert sum(bucket["tensors"] for bucket in layout["buckets"]) == 9


def test_jobs_of_the_other_protocol_can_be_read_but_not_reported_to(client: FlaskClient) -> None:
    tensor = {"name": "a", "num_elements": 10, "dtype": "f32"}
    model = {"model_name": "m", "tensor_list": [tensor]}
    assert client.post("/api/v1/register_tensors", json=model).status_code == 200
    (job,) = client.get("/api/v2/jobs").get_json()["jobs"]
    path = f"/api/v2/jobs/{job['id']}"
    detail = client.get(path).get_json()
    assert detail["protocol"] == "v1"
    assert_problem(client.post(f"{path}/events", json={"kind": "ended"}), 409, "/api/v1")
    steps = {"trial": 0, "steps": [{"step": 1, "seconds": [0.1]}]}
    assert_problem(client.post(f"{path}/observations", json=steps), 409, "/api/v1")
    assert_problem(client.post(f"{path}/profiles", json=PROFILE), 409, "/api/v1")
    known = set(registration()) | {"limits", "software"}
    same = {key: value for key, value in detail.items() if key in known}
    assert_problem(client.put(path, json=same), 409, "other content")


@pytest.mark.parametrize("content_type", ["text/plain"])
def test_a_body_must_be_declared_as_json(client: FlaskClient, content_type: str | None) -> None:
    response = client.post("/api/v1/register_tensors", data="{}", content_type=content_type)
    assert_problem(response, 415, "application/json")


def finish(tuner: Tuner) -> int:
    tuner.register("job", make_spec(limits={"max_samples": 6}))
    drive(tuner, "job", Ranks(noise=0.001))
    return len(tuner.store.trials.of("job"))


def test_each_measured_trial_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        trials = finish(Tuner(Store("sqlite://"), "random", [CsvLog(tmp_path)]))
    path = tmp_path / "bagua_autotune_job.csv"
    with path.open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["trial"]) for line in lines] == list(range(trials))
    assert lines[0]["bucket_bytes"] == str(25 << 20)
    assert float(lines[0]["seconds"]) > 0
    assert caplog.text.count(str(path)) == 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_does_not_stop_tuning(tmp_path: Path) -> None:
    assert finish(Tuner(Store("sqlite://"), "random", [CsvLog(tmp_path / "missing")])) > 3


pytestmark = pytest.mark.slow

RANKS = 4
WIRE_TENSORS = [{"name": t.name, "num_elements": t.elements, "dtype": t.dtype} for t in TENSORS]


class Rank:
    """A worker that sends each request to another replica."""

    def __init__(self, replicas: list[FlaskClient], rank: int) -> None:
        self.replicas, self.rank, self.chance = replicas, rank, random.Random(rank)
        self.running: dict[str, Any] = {}
        self.speed = 10.0 + rank

    def post(self, what: str, **body: Any) -> Any:
        client = self.chance.choice(self.replicas)
        answer = client.post(f"/api/v1/{what}", json={"model_name": "net", **body})
        assert answer.status_code == 200, answer.text
        return answer.get_json()

    def register(self) -> None:
        self.post("register_tensors", tensor_list=WIRE_TENSORS)

    def report(self, iteration: int) -> None:
        told = {"train_iter": iteration, "hyperparameters": self.running, "speed": self.speed}
        self.post("report_metrics", rank=self.rank, **told)

    def ask(self, iteration: int) -> dict[str, Any]:
        answer = self.post("ask_hyperparameters", rank=self.rank, train_iter=iteration)
        self.running = answer["recommended_hyperparameters"]
        return self.running


def clients(url: str, count: int, **settings: Any) -> Iterator[list[FlaskClient]]:
    stores = [Store(url) for _ in range(count)]
    chosen = Settings.load({}, database=url, world_size=RANKS, **settings)
    yield [create_app(chosen, store).test_client() for store in stores]
    for store in stores:
        store.close()


@pytest.fixture
def replicas(empty_url: str) -> Iterator[list[FlaskClient]]:
    yield from clients(empty_url, 2, warmup_seconds=0.0, trial_seconds=0.001)


def test_ranks_that_speak_to_two_replicas_at_once_are_told_the_same(
    replicas: list[FlaskClient], empty_url: str
) -> None:
    # A client of Flask's is of one thread.
    ranks = [Rank([r.application.test_client() for r in replicas], rank) for rank in range(RANKS)]
    ranks[0].register()
    sizes = set()
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(lambda rank: rank.ask(0), ranks))
        for iteration in range(100, 2600, 100):
            list(threads.map(Rank.report, ranks, [iteration] * RANKS))
            told = list(threads.map(Rank.ask, ranks, [iteration] * RANKS))
            assert told == [told[0]] * RANKS
            sizes.add(told[0]["bucket_size"])
    assert len(sizes) > 1
    store = Store(empty_url)
    (job,) = stored_jobs(store)
    last = {found.step: found.values for _, found in store.observations.of(job.id)}
    whole = [values for values in last.values() if len(values) == RANKS and None not in values]
    assert len(whole) == len(last), "a report was acknowledged and is not stored"
    store.close()


def test_a_pair_is_two_statements_while_nothing_is_tuned(store: Store) -> None:
    chosen = Settings.load({}, database="sqlite://", world_size=1, warmup_seconds=86_400)
    rank = Rank([create_app(chosen, store).test_client()], 0)
    rank.register()
    rank.ask(0)
    for iteration in (100, 200):
        rank.speed *= 2  # it has not settled
        with counting() as statements:
            rank.report(iteration)
            rank.ask(iteration)
    assert [statement.split()[:2] for statement in statements] == [["UPDATE", "families"]] * 2
