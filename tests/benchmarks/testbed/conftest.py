"""Hosts where this machine lets us make them; the testbed's files in the test's own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed import Network, Testbed


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["unshaped", "unshaped-2ms"], ids=["bridge", "switch"])
def network(request: pytest.FixtureRequest, cache: Path) -> Network:
    """Both ways in which hosts are connected, where they can be."""
    network = Network.parse(request.param)
    with Testbed(network, nodes=1) as testbed:
        if testbed.fallback is not None:
            pytest.skip(testbed.fallback)
    return network
