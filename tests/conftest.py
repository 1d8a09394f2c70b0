"""What every test needs: an environment without the user's settings, and hypothesis unhurried."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Several processes share a small machine; more threads than cores only make them slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the suite in the background has it, and all that it starts, ignore Ctrl-C;
# some tests send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Timing never decides a test.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

_TORCHRUN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the caller's BAGUA_* and torchrun settings and data directory from the test."""
    for name in list(os.environ):
        if name.startswith("BAGUA_") or name in _TORCHRUN_NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
