"""``POST /api/v2/prune``; its dry run and its token are in the tests of the command."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.store import Store
from tests.autotune.support import make_spec


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "older_than_days"),
        ({"older_than_days": 0}, "older_than_days"),
        ({"older_than_days": "30"}, "older_than_days"),
        ({"older_than_days": 1, "dry": True}, "dry"),
    ],
)
def test_jobs_are_deleted_only_where_the_request_is_valid(
    client: FlaskClient, store: Store, body: dict[str, Any], field: str
) -> None:
    store.create_job("old", make_spec(), at=1.0)
    refused = client.post("/api/v2/prune", json=body)
    assert refused.status_code == 422
    assert field in refused.get_json(force=True)["detail"]
    assert [job.id for job in store.jobs()] == ["old"]
    answer = client.post("/api/v2/prune", json={"older_than_days": 1}).get_json()
    assert answer["dry_run"] is False
    assert [(job["id"], job["state"]) for job in answer["jobs"]] == [("old", "tuning")]
    assert answer["jobs"][0]["last_contact_at"] == "1970-01-01T00:00:01Z"
    assert store.jobs() == []
