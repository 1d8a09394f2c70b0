"""What a report and a poll cost: in transactions and statements, which no busy machine changes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from math import log
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.model.job import CONTACT_SECONDS, Event, Observation
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.observations import StepCost
from bagua_autotune.tuning.status import JobState
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.lists import every_trial
from bagua_autotune.views.overviews import Overviews
from tests.autotune.support import Clock, counting, make_spec, registration

JOB = "/api/v2/jobs/job"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{tmp_path / 'autotune.db'}")
    yield opened
    opened.close()


@pytest.fixture
def client(store: Store) -> FlaskClient:
    return create_app(Settings(database="sqlite://"), store).test_client()


def report(client: FlaskClient, first: int, count: int, ranks: int = 4) -> dict[str, Any]:
    steps = [{"step": first + at, "seconds": [0.2] * ranks} for at in range(count)]
    answer = client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps})
    assert answer.status_code == 200
    return answer.get_json()


def kinds(statements: list[str]) -> list[str]:
    return [statement.split()[0] for statement in statements]


def test_a_report_is_one_writing_transaction(client: FlaskClient, store: Store) -> None:
    client.put(JOB, json=registration())
    report(client, 1, 1)
    with counting() as found:
        report(client, 2, 2)
    assert kinds(found) == ["BEGIN", "UPDATE", "SELECT", "SELECT", *["INSERT"] * 2, "COMMIT"]
    assert found[0] == "BEGIN IMMEDIATE"
    with counting() as found:
        report(client, 2, 2)
    assert kinds(found) == ["BEGIN", "UPDATE", "SELECT", "SELECT", "COMMIT"], "told before"


@pytest.mark.parametrize("ranks", [4, 1024])
def test_a_report_reads_no_values_of_ranks(client: FlaskClient, store: Store, ranks: int) -> None:
    client.put(JOB, json=registration(world_size=ranks, ranks_per_node=[ranks]))
    report(client, 1, 3, ranks)
    with counting() as found:
        report(client, 4, 1, ranks)
    assert not [s for s in found if s.startswith("SELECT") and "values" in s]
    assert len(found) == 6


def test_a_poll_reads_one_row_and_changes_nothing(client: FlaskClient, store: Store) -> None:
    client.put(JOB, json=registration())
    told = report(client, 1, 2)
    before = store.jobs.contact("job")
    assert report(client, 0, 0) == told
    with counting() as found:
        assert report(client, 0, 0) == told
    assert kinds(found) == ["SELECT"]
    assert "trials" not in found[0]
    assert store.jobs.contact("job") == before
    report(client, 3, 1)
    assert store.jobs.contact("job").revision == before.revision + 1


def test_a_poll_is_a_contact_that_leaves_every_view_as_it_was(store: Store) -> None:
    clock = Clock()
    tuner = Tuner(store, clock=clock)
    overviews = Overviews(tuner.store)
    tuner.register("job", make_spec())
    before, shown = store.jobs.contact("job"), overviews.overview("job")
    tuner.observe("job", 0, [])
    assert store.jobs.contact("job") == before
    clock.now += CONTACT_SECONDS
    tuner.observe("job", 0, [])
    after = store.jobs.contact("job")
    assert after.last_contact_at > before.last_contact_at + CONTACT_SECONDS
    assert after.version == before.version
    later = overviews.overview("job")
    assert later.trials is shown.trials
    assert later.job.last_contact_at == after.last_contact_at
    assert overviews.overview("job").job.last_contact_at == after.last_contact_at


def test_of_a_job_one_state_is_kept(store: Store) -> None:
    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, JobState) for each in gc.get_objects())

    tuner, before = Tuner(store), kept()
    tuner.register("job", make_spec())
    for step in range(20):
        tuner.take_event("job", Event("note", None, step, f"note {step}"))
        tuner.status("job")
    assert kept() - before == 1


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "async"])
def test_the_cost_of_a_step_is_kept_as_it_comes(store: Store, algorithm: str) -> None:
    knobs = {
        **registration()["knobs"],
        "algorithm": {"type": "categorical", "values": ["gradient_allreduce", "async"]},
    }
    default = {**registration()["default_configuration"], "algorithm": algorithm}
    tuner = Tuner(store, "random")
    tuner.register("job", make_spec(knobs=knobs, default_configuration=default))
    values = (0.1, 0.2, 0.3, 0.4)
    tuner.observe("job", 0, [Observation(1, values)])
    seconds = harmonic_mean(values) if algorithm == "async" else max(values)
    ((cost, _),) = store.observations.step_costs("job", 0)
    assert cost == pytest.approx(log(seconds))


def test_steps_of_an_older_release_count_by_what_it_stored(store: Store) -> None:
    tuner = Tuner(store, "random")
    tuner.register("job", make_spec(limits={"warmup_seconds": 0}))
    store.observations.add("job", 0, [Observation(step, (0.2,) * 4) for step in range(6)], 1.0)
    assert store.observations.step_costs("job", 0) == [StepCost(None)] * 6
    tuner.observe("job", 0, [Observation(6, (0.2,) * 4)])
    first = every_trial(store, "job")[0]
    assert (first.state, first.steps, first.seconds) == ("measured", 7, pytest.approx(0.2))
