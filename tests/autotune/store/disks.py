"""Disks that are small, and full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(point: Path, mebibytes: int) -> Iterator[Path]:
    """A disk of this size, in memory; skips the test where none can be mounted."""
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root, and a machine that allows it")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def fill(file: Path) -> None:
    """Have the file take all the room that there is on its disk."""
    with suppress(OSError), file.open("wb", buffering=0) as opened:
        while True:
            opened.write(bytes(4096))
