"""What every test needs: an environment without the user's settings, no network, and hypothesis
unhurried, with the same examples each time. And pools of real ranks, started once for all tests."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.outside import HELM, PLACE

if TYPE_CHECKING:
    from tests.ranks import RankPool

# The asserts of the contracts that the packages bring tell values, as those of tests do.
pytest.register_assert_rewrite("bagua_autotune.testing", "bagua_client.testing")

# Several processes share a small machine; more threads than cores only make them slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Last, so that the machine's own counts before.
os.environ["PATH"] += f"{os.pathsep}{PLACE / HELM}"

# A download would hide in a cache here and fail elsewhere, so pip and npm refuse one.
os.environ.update(PIP_NO_INDEX="1", npm_config_offline="true")


def _refuse_networks(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise where a test reaches a machine on the Internet."""
    if event != "socket.connect" or not isinstance(arguments[1], tuple):
        return
    with suppress(ValueError):  # a name, which the socket has yet to look up
        if ipaddress.ip_address(arguments[1][0]).is_global:
            raise AssertionError(f"a test connects to {arguments[1][0]}; see tests/outside.py")


sys.addaudithook(_refuse_networks)

# A shell that starts the suite in the background has it, and all that it starts, ignore Ctrl-C;
# some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Timing never decides a test. What runs by default has the same examples each time; "make fuzz"
# names the other profile, and a seed.
_UNHURRIED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "database": None,
}
settings.register_profile("repeatable", derandomize=True, max_examples=25, **_UNHURRIED)
settings.register_profile("fuzz", derandomize=False, print_blob=True, **_UNHURRIED)
settings.load_profile("repeatable")
# Hypothesis mixes in constants of the modules that are imported by then, which depend on the tests
# that ran before, and so on how they were dealt out. There is no public switch.
providers._get_local_constants = lambda: providers._local_constants  # as yet none

_ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file of which nothing will run: importing it takes every process its time."""
    wanted = config.option.markexpr
    if collection_path.suffix != ".py" or wanted not in ("slow", "not slow"):
        return None
    text = collection_path.read_text()
    is_left_out = "mark.slow" not in text if wanted == "slow" else _ALL_SLOW.search(text)
    return bool(is_left_out) or None


_TORCHRUN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Hide the caller's BAGUA_* and torchrun settings and data directory from the test; and from
    the tests after it what a benchmark makes of logging, and what would yet be said of this one."""
    for name in list(os.environ):
        if name.startswith("BAGUA_") or name in _TORCHRUN_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    yield
    logging.disable(logging.NOTSET)
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


def _pool(*ranks_per_node: int, spawned: bool = False) -> Iterator[RankPool]:
    from tests.ranks import RankPool  # It imports torch.

    pool = RankPool(ranks_per_node, spawned=spawned)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    """One rank alone."""
    yield from _pool(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two ranks on one node."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[RankPool]:
    """Three ranks: two on the first node, one on the second.

    Spawned, so that what the ranks agree on is also tried where their hashes of strings differ.
    """
    yield from _pool(2, 1, spawned=True)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four ranks: two on each of two nodes."""
    yield from _pool(2, 2)
