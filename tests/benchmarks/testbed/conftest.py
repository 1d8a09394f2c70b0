"""Hosts where this machine lets us make them; the testbed's files in the test's own folder."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from benchmarks.testbed import Network, Testbed, tools


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@functools.cache
def why_not(network: Network) -> str | None:
    with Testbed(network, nodes=1) as testbed:
        return testbed.fallback


def possible(network: Network) -> Network:
    reason = why_not(network)
    if reason is not None:
        pytest.skip(reason)
    return network


@pytest.fixture
def bridged(cache: Path) -> Network:
    return possible(Network())


@pytest.fixture
def switched(cache: Path) -> Network:
    return possible(Network(round_trip_seconds=0.002))


@pytest.fixture(params=["bridged", "switched"])
def network(request: pytest.FixtureRequest) -> Network:
    """Both ways in which hosts are connected, where they can be."""
    network: Network = request.getfixturevalue(request.param)
    return network


def link(folder: Path, program: str) -> None:
    path = shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is not None:
        (folder / program).symlink_to(path)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where all programs are looked for: util-linux is there, iproute2 and a compiler are not."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("setpriv", "chrt", "nice", "true"):
        link(folder, name)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(tools, "SYSTEM_FOLDERS", "")
    return folder


@pytest.fixture
def iproute2(only: Path) -> None:
    """It is there, too."""
    link(only, "ip")
    link(only, "tc")
