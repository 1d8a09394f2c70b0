"""Waiting for what a process says and for its end; the probe when the other side is lost; what a
script leaves in the folder of results."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks.testbed import Network, Testbed, probe
from benchmarks.testbed.__main__ import read_since, written
from benchmarks.testbed.job import ProcessError, read_line

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


ADDRESS = "127.77.0.1"  # a loopback address that nothing else has


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(probe.__file__), *words]
    return subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)


def test_the_asking_side_says_that_the_other_hung_up() -> None:
    with socket.create_server((ADDRESS, probe.PORT)) as server:
        process = start("ask", ADDRESS, "1")
        connection, _ = server.accept()
        connection.recv(len(probe.PING))
        connection.close()
        output, errors = process.communicate()
    assert (output, errors, process.returncode) == ("", "ask: the other side hung up\n", 1)


def test_the_answering_side_says_that_the_other_hung_up() -> None:
    process = start("answer", ADDRESS)
    assert process.stdout is not None
    process.stdout.readline()
    with socket.create_connection((ADDRESS, probe.PORT)) as connection:
        for _ in range(probe.PINGS):
            connection.sendall(probe.PING)
            probe.receive(connection, len(probe.PING))
        connection.sendall(f"{600:<16g}".encode())
    output, errors = process.communicate()
    assert (output, errors, process.returncode) == ("", "answer: the other side hung up\n", 1)


@pytest.mark.usefixtures("only")
def test_a_probe_that_cannot_start_is_told_of() -> None:
    with (
        socket.create_server(("127.0.0.1", probe.PORT)),
        Testbed(Network()) as testbed,
        pytest.raises(RuntimeError, match=r"host0 and host1 ended .* already in use"),
    ):
        testbed.probe()


def test_only_what_is_new_or_changed_is_read(tmp_path: Path) -> None:
    for name in ("old", "changed"):
        (tmp_path / f"{name}.json").write_text("[1]")
        os.utime(tmp_path / f"{name}.json", (1, 1))
    before = written(tmp_path)
    (tmp_path / "changed.json").write_text("[2]")
    (tmp_path / "new.json").write_text("[3]")
    (tmp_path / "new.log").write_text("[4]")
    assert read_since(tmp_path, before) == ({"changed.json": [2], "new.json": [3]}, [])


def test_what_is_broken_is_named_and_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    (tmp_path / "c.json").write_text("[1]")
    found, problems = read_since(tmp_path, {})
    assert found == {"c.json": [1]}
    assert [text.split(" ")[0] for text in problems] == [
        str(tmp_path / "a.json"),
        str(tmp_path / "b.json"),
    ]
