"""A PostgreSQL that stands still: nothing in the service waits for it for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import psutil
import pytest
import requests
from sqlalchemy import text

from bagua_autotune.app import create_app
from bagua_autotune.connections import THREADS
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.engine import postgresql
from tests.autotune.server import serving_here
from tests.autotune.store.postgresql import find_binaries, running_cluster
from tests.autotune.support import registration

pytestmark = pytest.mark.slow

# Far more than all limits of a request together.
DEADLINE_SECONDS = 60.0


@pytest.fixture
def hanging_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A PostgreSQL of the test's own, and limits that are soon reached."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr(postgresql, "ANSWER_SECONDS", 4.0)
    monkeypatch.setattr(postgresql, "CONNECTION_WAIT_SECONDS", 0.2)
    with running_cluster(binaries) as url:
        yield url


@contextmanager
def serving(url: str) -> Iterator[str]:
    with (
        closing(Store(url)) as store,
        serving_here(create_app(Settings(database=url), store)) as address,
    ):
        yield address


def processes(url: str, *, with_postmaster: bool) -> list[psutil.Process]:
    """Those of the server: what answers each connection, or all of it."""
    port = int(url.rpartition(":")[2].partition("/")[0])
    (master,) = {
        connection.pid
        for connection in psutil.net_connections("tcp4")
        if connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    }
    postmaster = psutil.Process(master)
    backends = [p for p in postmaster.children() if "autotune" in " ".join(p.cmdline())]
    return [postmaster, *postmaster.children()] if with_postmaster else backends


@pytest.mark.parametrize("with_postmaster", [True, False])
def test_a_database_that_stands_still_is_a_503_and_no_end(
    hanging_soon: str, with_postmaster: bool
) -> None:
    with serving(hanging_soon) as service, requests.Session() as session:

        def get(path: str) -> requests.Response:
            return requests.get(service + path, timeout=DEADLINE_SECONDS)

        assert session.put(f"{service}/api/v2/jobs/job", json=registration()).status_code == 201
        stopped = processes(hanging_soon, with_postmaster=with_postmaster)
        assert stopped
        for process in stopped:
            os.kill(process.pid, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(4 * THREADS) as pool:
                asked = [pool.submit(get, "/api/v2/jobs/job") for _ in range(4 * THREADS)]
                assert get("/healthz").status_code == 200
                answers = [future.result() for future in asked]
            codes = {answer.status_code for answer in answers}
            if with_postmaster:
                assert codes == {503}
                assert {answer.headers["Retry-After"] for answer in answers} == {"2"}
                assert get("/readyz").status_code == 503
                # Nobody waits any more.
                assert get("/healthz").elapsed.total_seconds() < DEADLINE_SECONDS / 2
            else:
                assert codes <= {200, 503}  # its place is taken by another
        finally:
            for process in stopped:
                os.kill(process.pid, signal.SIGCONT)
        for _ in range(100):
            if get("/readyz").status_code == 200:
                break
            time.sleep(0.1)
        assert get("/api/v2/jobs/job").status_code == 200
        posted = session.post(
            f"{service}/api/v2/jobs/job/observations", json={"trial": 0, "steps": []}
        )
        assert posted.status_code == 200


def test_limits_hold_on_the_server_too(postgresql_url: str) -> None:
    store = Store(postgresql_url)
    for name, seconds in postgresql.SERVER_LIMITS_SECONDS.items():
        assert store.database.read(text(f"SHOW {name}")) == [(f"{seconds:g}s",)]
    store.close()
