"""The few words that reasons are told in, from what the service and the client really say."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from bagua_autotune.metrics.exposition import STORE_ERRORS, label_of
from tests.autotune.api.driving import JOB, drive, settle
from tests.autotune.metrics.scraping import of, scrape
from tests.autotune.support import MIB, Ranks, registration

ONE_SIZE = {
    "knobs": {"bucket_bytes": {"type": "log_integer", "low": 25 * MIB, "high": 25 * MIB}},
    "default_configuration": {"bucket_bytes": 25 * MIB},
}


def flat(configuration: object) -> float:
    return 0.2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "nothing_faster"),
        ({"limits": {"remaining_steps": 50}}, "too_few_steps"),
        (ONE_SIZE, "nothing_to_try"),
        ({"limits": {"max_samples": 1}}, "only_default"),
    ],
)
def test_why_a_default_is_kept(client: FlaskClient, changes: dict[str, Any], reason: str) -> None:
    client.put(JOB, json=registration(**changes))
    drive(client, Ranks(noise=0.001, step_seconds=flat), steps=10)
    assert of(scrape(client), "job_result") == {("digits", reason): 1}


def test_the_best_of_an_earlier_job_is_kept(client: FlaskClient) -> None:
    client.put("/api/v2/jobs/before", json=registration())
    drive(client, Ranks(noise=0.001, step_seconds=flat), 10, "/api/v2/jobs/before")
    client.put(JOB, json=registration())
    drive(client, Ranks(noise=0.001, step_seconds=flat), steps=10)
    assert of(scrape(client), "job_result") == {("digits", "earlier_best"): 1}


def test_ranks_that_disagree_all_the_time(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    for trial in range(3):
        said = {"kind": "disagreement", "trial": trial, "message": "rank 3 disagreed with the rest"}
        settle(client, client.post(f"{JOB}/events", json=said).get_json())
    found = scrape(client)
    assert of(found, "job_result") == {("digits", "disagreement"): 1}
    assert of(found, "trial_failures_total")["digits", "disagreement"] == 3


def test_what_clients_say_changes_no_reason(client: FlaskClient) -> None:
    """Neither of a trial nor of the result, whose final choice the ranks could not carry out."""
    client.put(JOB, json=registration())
    said = {"kind": "disagreement", "message": "nothing was clearly faster"}
    client.post(f"{JOB}/events", json={**said, "trial": 0})
    drive(client, Ranks(noise=0.001), steps=10)
    assert of(scrape(client), "job_result") == {("digits", "winner"): 1}
    client.post(f"{JOB}/events", json=said)
    found = scrape(client)
    assert of(found, "job_result") == {("digits", "disagreement"): 1}
    failures = {"disagreement": 1, "diverged": 0, "run_failed": 0}
    told = of(found, "trial_failures_total")
    assert told == {("digits", reason): count for reason, count in failures.items()}


def test_a_training_that_suffers(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    said = {"kind": "diverged", "message": "the loss is not finite"}
    client.post(f"{JOB}/events", json={**said, "trial": 0})
    drive(client, Ranks(noise=0.001), steps=10)
    client.post(f"{JOB}/events", json=said)
    found = scrape(client)
    assert of(found, "job_result") == {("digits", "diverged"): 1}
    # The trial, and the run of what was kept.
    assert of(found, "trial_failures_total")["digits", "diverged"] == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PoolTimeout("QueuePool limit reached"), "busy"),
        (OperationalError("BEGIN", {}, Exception("database is locked")), "busy"),
        (OperationalError("SELECT", {}, Exception("disk I/O error")), "unavailable"),
        (IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed")), "statement"),
        (SQLAlchemyError("?"), "other"),
    ],
)
def test_errors_of_the_store(error: SQLAlchemyError, reason: str) -> None:
    assert label_of(error) == reason
    assert reason in STORE_ERRORS
