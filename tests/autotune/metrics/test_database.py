"""What the metrics say of the database as a whole."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.metrics.scraping import Samples, of, scrape
from tests.autotune.support import MIB, make_spec


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


def test_a_database_in_memory_has_no_disk() -> None:
    found = scraped("sqlite://")
    assert not of(found, "database_bytes")
    assert not of(found, "database_free_bytes")


def test_a_server_tells_its_size_but_not_its_disk(postgresql_url: str) -> None:
    found = scraped(postgresql_url)
    assert of(found, "database_bytes")[()] > MIB
    assert not of(found, "database_free_bytes")


@pytest.mark.parametrize("team", [None, "vision"])
def test_jobs_of_teams_that_are_in_no_file_make_no_labels(team: str | None) -> None:
    with closing(Store("sqlite://")) as store:
        store.jobs.create("job", make_spec(team=team), at=1.0)
        client = create_app(Settings(), store).test_client()
        assert of(scrape(client), "team_running") == {("none",): 1}
