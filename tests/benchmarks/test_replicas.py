"""A small run of the benchmark of replicas on a real PostgreSQL, and the proxy before them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests

from benchmarks import replicas
from benchmarks.support.fault_injection import replicas as module
from benchmarks.support.fault_injection.proxy import FaultyProxy
from tests.autotune.store.postgresql import find_binaries

pytestmark = pytest.mark.slow


def test_a_job_is_tuned_while_a_replica_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr(module, "QUIET_SECONDS", (0.5, 0.5))
    monkeypatch.setattr(module, "TROUBLE_SECONDS", (60.0, 60.0))
    outcome = replicas.tune(replicas=2, jobs=1, seed=1, crash_after=0)
    assert outcome.troubles["kill"] >= 1
    assert outcome.show(), "all is right"
    assert not replace(outcome, superfluous=1).show()
    assert not replace(outcome, decided=outcome.decided + 1000).show()
    assert not replace(outcome, statuses={500: 1}).show()
    assert not replace(outcome, troubles={"kill": 1}).show()


def test_each_replica_has_its_turn_and_a_dead_one_is_passed_over() -> None:
    with ExitStack() as stack:
        ports = [stack.enter_context(_answering(name)) for name in "abc"]
        url = stack.enter_context(FaultyProxy(ports, seed=1, every=0)).url
        assert [requests.get(url, timeout=30).text for _ in range(4)] == ["a", "b", "c", "a"]
    with ExitStack() as stack:
        living = [stack.enter_context(_answering(name)) for name in "de"]
        url = stack.enter_context(FaultyProxy([ports[0], *living], seed=1, every=0)).url
        assert [requests.get(url, timeout=30).text for _ in range(4)] == ["d", "d", "e", "d"]


@contextmanager
def _answering(name: str) -> Iterator[int]:
    """Its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(name.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
