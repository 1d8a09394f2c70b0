"""What is left of a run that ends before its time, and what is left alone."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.testbed import Network, Testbed, records
from benchmarks.testbed.records import RUN, Record, marked, namespaces, started
from benchmarks.testbed.tools import dies_with_parent
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

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


@pytest.fixture
def running(switched: Network, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command with a job and a service, when all of its ranks are there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    results = tmp_path / "results"
    options = ["--ranks-per-node", "1", "--network", str(switched), "--serve"]
    options += ["--results", str(results)]
    process = subprocess.Popen(
        [*COMMAND, "run", *options, "--", str(tmp_path / "script.py")], cwd=ROOT
    )
    wait_until(lambda: process.poll() is not None or len(list(results.glob("*"))) == 2, "two ranks")
    assert process.poll() is None
    yield process
    process.kill()
    process.wait()


def record_of(process: subprocess.Popen[bytes]) -> Record:
    (record,) = (record for record in records.read()[0] if record.owner == process.pid)
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
    wait_until(lambda: len([pid for pid in pids if started(pid) is not None]) <= 2, "their end")

    # Another run that starts on this machine in between may be first to remove it.
    subprocess.run([*COMMAND, "clean"], cwd=ROOT, check=True)
    assert_nothing_left(record, pids)
    assert foreign[0] in namespaces()
    assert started(foreign[1]) is not None


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
    network: Network, foreign: tuple[str, int], kept: Path
) -> None:
    # With records of our own: other runs on this machine are none of this test's business.
    with Testbed(network, nodes=1) as testbed:
        (record,) = records.read()[0]
        process = testbed.hosts[0].popen(["sleep", "600"])
        assert records.clean() == ([], [])
        assert process.poll() is None
        assert records.clean(also_of_the_living=True) == ([record], [])
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
        assert_nothing_left(record, [process.pid])
    assert foreign[0] in namespaces()
    assert started(foreign[1]) is not None


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of records of the test's own."""
    monkeypatch.setattr(records, "folder", lambda: tmp_path)
    return tmp_path


def of_the_dead(record: Record) -> Record:
    """The same record, of an owner that is gone."""
    record = replace(record, owner_started="1")
    record.path.write_text(json.dumps(asdict(record)))
    return record


@pytest.mark.parametrize("text", ['{"version": 2}', "{"])
def test_what_is_no_record_of_this_version_is_named_and_left(kept: Path, text: str) -> None:
    path = kept / "00000000.json"
    path.write_text(text)
    record = of_the_dead(Record.create("unshaped", []))
    removed, (problem,) = records.clean()
    assert removed == [record]
    assert str(path) in problem
    assert path.read_text() == text


@pytest.mark.parametrize("reason", ["busy", "ip is not installed"])
def test_what_cannot_be_removed_hinders_nothing_else(
    kept: Path, only: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    stuck, other = (of_the_dead(Record.create("unshaped", ["host0"])) for _ in range(2))
    monkeypatch.setattr(records, "NAMESPACES", tmp_path / "netns")
    (tmp_path / "netns").mkdir()
    (tmp_path / "netns" / stuck.namespaces[0]).touch()
    if reason == "busy":  # of an iproute2 that refuses
        (only / "ip").write_text("#!/bin/sh\n[ $2 = pids ] || { echo busy >&2; exit 1; }\n")
        (only / "ip").chmod(0o755)
    removed, (problem,) = records.clean()
    assert removed == [other]
    assert problem.startswith(f"run {stuck.run} is not removed: ")
    assert problem.endswith(reason)
    assert records.read() == ([stuck], [])


def test_what_a_run_on_loopback_left_is_found_by_its_mark(kept: Path) -> None:
    record = of_the_dead(Record.create("loopback", []))
    script = "sleep 600 & echo ready; exec sleep 600"
    process = subprocess.Popen(
        ["sh", "-c", script], env={**os.environ, **record.mark}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    pids = record.processes()
    assert len(pids) == 2
    assert records.clean() == ([record], [])
    with process:
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
    assert_nothing_left(record, pids)


def test_a_tool_ends_with_who_runs_it() -> None:
    if not dies_with_parent():
        pytest.skip("setpriv is lacking")
    run = secrets.token_hex(4)
    program = "from benchmarks.testbed import tools; tools.run('sleep', '600')"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, RUN: run}
    )
    wait_until(lambda: running_sleep(marked(f"{RUN}={run}")), "the tool")
    process.kill()
    process.wait()
    wait_until(lambda: not marked(f"{RUN}={run}"), "its end")


def running_sleep(pids: set[int]) -> bool:
    return any(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in pids)


def test_a_namespace_that_was_half_made_is_removed(bridged: Network, kept: Path) -> None:
    record = of_the_dead(Record.create("unshaped", ["host0"]))
    Path("/run/netns", *record.namespaces).touch()  # the file is made before it is mounted on
    assert set(record.namespaces) <= set(namespaces())
    assert records.clean() == ([record], [])
    assert_nothing_left(record, [])


def test_a_process_that_got_the_number_of_an_owner_is_not_the_owner() -> None:
    def record(began: str | None) -> Record:
        return Record("0", os.getpid(), began or "", "unshaped", [], "")

    assert record(started(os.getpid())).owner_alive
    assert not record("1").owner_alive


def test_a_record_that_was_never_finished_is_removed(kept: Path) -> None:
    (kept / "0a0a0a0a.json").touch()
    assert records.read() == ([], [])
    assert records.clean() == ([], [])
    assert list(kept.glob("*.json")) == []


def test_the_next_run_removes_what_a_killed_one_left(bridged: Network, tmp_path: Path) -> None:
    program = "import os; from benchmarks.testbed import *; Testbed(Network()).__enter__(); "
    program += "os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    killed.wait()
    record = record_of(killed)
    with Testbed(bridged, nodes=1):
        assert_nothing_left(record, [])
