"""A PostgreSQL that crashes under an open store."""

from __future__ import annotations

import pytest

from bagua_autotune.store import Store
from tests.autotune.store.postgresql import crash_and_restart, find_binaries, running_cluster
from tests.autotune.support import make_spec


def test_what_was_told_is_there_after_a_crash_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    with running_cluster(binaries) as url:
        store = Store(url)
        store.jobs.create("job", make_spec(), at=1.0)
        crash_and_restart(binaries, url)
        assert store.jobs.get("job").name == "digits"
        store.close()
    assert [record.getMessage() for record in caplog.records] == []
