"""A small run of the benchmark of replicas, on a real PostgreSQL."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from benchmarks import replicas
from benchmarks.fault_injection import replicas as module
from benchmarks.fault_injection.proxy import FaultyProxy, Request
from tests.autotune.store.postgresql import find_binaries


def test_a_job_is_tuned_while_a_replica_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed")
    monkeypatch.setattr(module, "QUIET_SECONDS", (0.1, 0.2))
    outcome = replicas.tune(replicas=2, jobs=1, seed=1, crash_after=1)
    assert outcome.troubles["kill"] >= 1
    assert outcome.show(), "all is right"
    assert not replace(outcome, superfluous=1).show()
    assert not replace(outcome, decided=outcome.decided + 1000).show()
    assert not replace(outcome, statuses={500: 1}).show()


def test_a_replica_that_does_not_listen_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = silent.getsockname()[1]
    proxy = FaultyProxy([dead, dead], seed=1, every=0)
    with pytest.raises(ConnectionRefusedError):
        proxy.pass_on(Request("GET", "/", b"", {}))
