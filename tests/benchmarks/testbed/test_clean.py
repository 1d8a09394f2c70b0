"""What is left of a run that ends before its time, and what is left alone."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.testbed import Network, Testbed, records
from benchmarks.testbed.records import Record, namespaces, started

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "benchmarks.testbed"]
# It leaves a process behind that nobody waits for, as a data loader may.
SCRIPT = """
import os, pathlib, subprocess, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(os.environ["BAGUA_TESTBED_RESULTS"], os.environ["RANK"]).touch()
time.sleep(600)
"""
WAIT_SECONDS = 60


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def running(network: Network, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command with a job and a service, when all of its ranks are there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    results = tmp_path / "results"
    options = ["--ranks-per-node", "1", "--network", str(network), "--serve"]
    options += ["--results", str(results)]
    process = subprocess.Popen(
        [*COMMAND, "run", *options, "--", str(tmp_path / "script.py")], cwd=ROOT
    )
    wait_until(lambda: process.poll() is not None or len(list(results.glob("*"))) == 2)
    assert process.poll() is None
    yield process
    process.kill()
    process.wait()


def record_of(process: subprocess.Popen[bytes]) -> Record:
    (record,) = (record for record in records.records() if record.owner == process.pid)
    return record


def assert_nothing_left(record: Record, pids: list[int]) -> None:
    assert not set(record.namespaces) & set(namespaces())
    assert [pid for pid in pids if started(pid) is not None] == []
    assert not Path(record.folder).exists()
    assert not (records.folder() / f"{record.run}.json").exists()


def test_after_kill_9_the_ranks_die_and_clean_removes_the_rest(
    running: subprocess.Popen[bytes], foreign: tuple[str, int]
) -> None:
    record = record_of(running)
    pids = record.processes()
    assert len(pids) >= 7  # two torchruns, ranks, what these leave behind, the service
    running.kill()
    running.wait()
    # But for the two that were left behind, all follow by themselves.
    wait_until(lambda: len([pid for pid in pids if started(pid) is not None]) <= 2)

    # Another run that starts on this machine in between may be first to remove it.
    subprocess.run([*COMMAND, "clean"], cwd=ROOT, check=True)
    assert_nothing_left(record, pids)
    assert foreign[0] in namespaces()
    assert started(foreign[1]) is not None


@pytest.mark.parametrize("network", ["unshaped-2ms"], indirect=True, ids=["switch"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_ctrl_c_nothing_is_left(running: subprocess.Popen[bytes], number: int) -> None:
    record = record_of(running)
    pids = record.processes()
    running.send_signal(number)
    assert running.wait(WAIT_SECONDS) == 128 + number
    assert_nothing_left(record, pids)


@pytest.fixture
def foreign() -> Iterator[tuple[str, int]]:
    """Somebody else's namespace, and a process in it."""
    name = f"foreign-{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    process = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "600"])
    yield name, process.pid
    process.kill()
    process.wait()
    subprocess.run(["ip", "netns", "delete", name], check=True)


def test_of_the_living_nothing_is_removed_unless_asked_for(
    network: Network, foreign: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Records of our own: other runs on this machine are none of this test's business.
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    with Testbed(network, nodes=1) as testbed:
        (record,) = records.records()
        process = testbed.hosts[0].popen(["sleep", "600"])
        assert records.clean() == []
        assert process.poll() is None
        assert records.clean(also_of_the_living=True) == [record]
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        assert_nothing_left(record, [process.pid])
    assert foreign[0] in namespaces()
    assert started(foreign[1]) is not None


def test_a_process_that_got_the_number_of_an_owner_is_not_the_owner() -> None:
    def record(began: str | None) -> Record:
        return Record("0", os.getpid(), began or "", "unshaped", [], "")

    assert record(started(os.getpid())).owner_alive
    assert not record("1").owner_alive


def test_a_record_that_was_never_finished_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    (tmp_path / "0a0a0a0a.json").touch()
    assert list(records.records()) == []
    assert records.clean() == []
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize("network", ["unshaped"], indirect=True, ids=["bridge"])
def test_the_next_run_removes_what_a_killed_one_left(network: Network, tmp_path: Path) -> None:
    program = "import os; from benchmarks.testbed import *; Testbed(Network()).__enter__(); "
    program += "os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    killed.wait()
    record = record_of(killed)
    with Testbed(network, nodes=1):
        assert_nothing_left(record, [])
