"""Waiting for what another process does. By itself, as tests that need no torch load none."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = 60) -> None:
    """Look until it holds; the time is only to find a hang."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {timeout_seconds:g} s"
        time.sleep(0.05)
