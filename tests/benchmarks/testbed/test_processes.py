"""Waiting for what a process says, and for its end."""

from __future__ import annotations

import subprocess
from subprocess import PIPE

import pytest

from benchmarks.testbed.processes import ProcessError, read_line

pytestmark = pytest.mark.slow


def shell(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", script], stdout=PIPE, stderr=PIPE)


def test_whoever_ends_without_a_line_has_its_exit_code_and_its_reason_told() -> None:
    process = shell("printf half-a-line; echo no such file >&2; exit 3")
    with pytest.raises(ProcessError, match="ended with exit code 3: no such file"):
        read_line(process)


def test_whoever_says_nothing_is_killed() -> None:
    process = shell("exec sleep 600")
    with pytest.raises(ProcessError, match=r"said nothing for 0\.1 s"):
        read_line(process, 0.1)
    assert process.returncode == -9
