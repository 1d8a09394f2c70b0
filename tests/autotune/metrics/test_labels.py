"""The metrics' names and words: as docs/monitoring.md lists them, the few words that reasons are
told in, from what the service and the client really say; and what is said of the database as a
whole."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from bagua_autotune.app import create_app
from bagua_autotune.metrics.exposition import STORE_ERRORS, label_of
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.api.driving import JOB, drive, settle
from tests.autotune.metrics.scraping import Samples, of, scrape
from tests.autotune.support import MIB, Ranks, make_spec, registration

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


def scraped(url: str) -> Samples:
    with closing(Store(url)) as store:
        return scrape(create_app(Settings(), store).test_client())


def test_a_file_s_size_and_the_room_on_its_disk(tmp_path: Path) -> None:
    with closing(Store(f"sqlite:///{tmp_path / 'a.db'}")) as store:
        client = create_app(Settings(), store).test_client()
        before = of(scrape(client), "database_bytes")[()]
        for number in range(40):
            store.jobs.create(str(number), make_spec(), at=1.0)
        found = scrape(client)
    assert before + MIB < of(found, "database_bytes")[()] < 40 * MIB
    total = shutil.disk_usage(tmp_path).total
    assert 0 < of(found, "database_free_bytes")[()] <= total


def test_a_database_in_memory_and_a_server_have_no_disk_and_a_server_a_size(
    postgresql_url: str,
) -> None:
    memory, server = scraped("sqlite://"), scraped(postgresql_url)
    assert not of(memory, "database_bytes")
    assert of(server, "database_bytes")[()] > MIB
    assert not of(memory, "database_free_bytes") | of(server, "database_free_bytes")


@pytest.mark.parametrize("team", [None, "vision"])
def test_jobs_of_teams_that_are_in_no_file_make_no_labels(team: str | None) -> None:
    with closing(Store("sqlite://")) as store:
        store.jobs.create("job", make_spec(team=team), at=1.0)
        client = create_app(Settings(), store).test_client()
        assert of(scrape(client), "team_running") == {("none",): 1}


DOCUMENT = Path(__file__).parents[3] / "docs" / "monitoring.md"
ROW = re.compile(r"^\| `(bagua_autotune_\w+)(?:\{([\w,]+)\})?` \|", re.MULTILINE)
# The kind of a sample, not of what it is of.
BUCKET = "le"
MEMORY = {"peak_bytes": 5, "limit_bytes": 9, "device_bytes": 10}


def documented() -> dict[str, set[str]]:
    rows = ROW.findall(DOCUMENT.read_text())
    assert len({name for name, _ in rows}) == len(rows)
    return {name: set(filter(None, labels.split(","))) for name, labels in rows}


def told(client: FlaskClient) -> dict[str, set[str]]:
    text = client.get("/metrics").text
    names = re.findall(r"^# HELP (\S+)", text, re.MULTILINE)
    labels = {name: set[str]() for name in names if name.startswith("bagua_autotune_")}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            base = re.sub(r"_(bucket|sum|count)$", "", sample.name)
            for name in {sample.name, base} & labels.keys():
                labels[name] |= sample.labels.keys() - {BUCKET}
    return labels


def test_the_table_is_that_of_the_metrics(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    computing = [0.1, 0.1, 0.1, 0.15]  # the last rank is slow
    steps = [{"step": n, "seconds": [0.2] * 4, "compute_seconds": computing} for n in range(1, 9)]
    client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps, "memory": MEMORY})
    running = told(client)
    drive(client, Ranks(noise=0.001), steps=10, memory=MEMORY)
    finished = told(client)
    assert {name: running[name] | finished[name] for name in finished} == documented()
