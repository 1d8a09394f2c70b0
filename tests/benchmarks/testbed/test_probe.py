"""The probe, when the other side is lost."""

from __future__ import annotations

import socket
import subprocess
import sys
from subprocess import PIPE

import pytest

from benchmarks.testbed import Network, Testbed, probe

pytestmark = pytest.mark.slow

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
