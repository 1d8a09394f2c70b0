"""The service as a process: starting, ending, being killed in the middle of a tuning."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
import requests

from bagua_autotune.model.job import SILENT_SECONDS
from bagua_autotune.server import PARENT_LOOK_SECONDS
from bagua_autotune.store import Store
from bagua_autotune.store.engine.sqlite import BUSY_SECONDS
from tests.autotune.server import PATIENCE_SECONDS, ServeProcess, tuning
from tests.autotune.support import Ranks, make_spec, registration, stored_jobs


def serve_until_it_fails(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bagua_autotune", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, **environment},
    )


def is_alive(pid: int) -> bool:
    """Whether it runs; an orphan that nobody reaps counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


def test_it_starts_on_a_free_port_and_ends_cleanly(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "a.db") as service:
        assert requests.get(f"{service.url}/readyz", timeout=PATIENCE_SECONDS).ok
        assert service.url.startswith("http://127.0.0.1:")
        port = service.url.rpartition(":")[2]
        way = f"run there first: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}\n"
        assert way in service.log(), "how another machine sees its page"
        assert service.stop(signal.SIGINT) == 0
        assert "Traceback" not in service.log()


def test_a_signal_that_comes_again_does_not_break_into_its_end(tmp_path: Path) -> None:
    """As from timeout, which sends it to the process and to its group."""
    with ServeProcess(tmp_path / "a.db") as service:
        while service.process.poll() is None:
            service.process.send_signal(signal.SIGTERM)
        assert service.process.returncode == 0
        assert "Traceback" not in service.log()


def test_it_ends_cleanly_before_it_serves(tmp_path: Path) -> None:
    """Libraries are being imported in a thread then, which Python's own end would wait for."""
    with ServeProcess(tmp_path / "a.db") as service:
        assert service.stop() == 0
        assert service.log().count("\n") == 1


def test_a_killed_service_goes_on_at_the_same_trial(tmp_path: Path) -> None:
    database, ranks = tmp_path / "a.db", Ranks(noise=0.01)
    with ServeProcess(database) as service:
        before = next(
            state
            for state in tuning(service.url, "job", ranks)
            if state["trial"] and state["trial"]["index"] == 3
        )
        service.stop(signal.SIGKILL)
    with ServeProcess(database) as service:
        first, *_, last = tuning(service.url, "job", ranks)
        assert first["trial"] == before["trial"]
        assert last["result"]["kept"] == "winner"
        trials = requests.get(
            f"{service.url}/api/v2/jobs/job/trials", timeout=PATIENCE_SECONDS
        ).json()["trials"]
        assert [trial["index"] for trial in trials] == list(range(len(trials)))


class Parent:
    """Context manager: a process that starts the service, as rank 0 of a training does."""

    SCRIPT = (
        "import os, subprocess, sys\n"
        "service = subprocess.Popen([sys.executable, '-m', 'bagua_autotune', 'serve', '--port',"
        " '0', '--parent-pid', str(os.getpid())], stdout=subprocess.PIPE, text=True)\n"
        "print(service.pid, service.stdout.readline(), flush=True)\n"
        "service.wait()\n"
    )

    def __init__(self, database: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "BAGUA_AUTOTUNE_DATABASE": f"sqlite:///{database}"},
        )

    def __enter__(self) -> Parent:
        assert self.process.stdout
        pid, _, said = self.process.stdout.readline().partition(" ")
        self.service_pid, self.url = int(pid), said.split()[-1]
        assert is_alive(self.service_pid)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """It cannot tell anybody."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def wait_for_the_end_of_the_service(self, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while is_alive(self.service_pid):
            assert time.monotonic() < deadline, "the service outlived its parent"
            time.sleep(0.05)


def begin(url: str, job_id: str) -> str:
    """Register a job and run its first steps; returns its state."""
    job = f"{url}/api/v2/jobs/{job_id}"
    assert requests.put(job, json=registration(), timeout=PATIENCE_SECONDS).ok
    body = {"trial": 0, "steps": [{"step": 1, "seconds": [0.2] * 4}]}
    answer = requests.post(f"{job}/observations", json=body, timeout=PATIENCE_SECONDS)
    return str(answer.json()["state"])


@pytest.mark.slow
def test_it_ends_with_its_parent_and_with_it_the_jobs_that_it_had_in_hand(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    with ServeProcess(database) as other, Parent(database) as parent:
        assert begin(other.url, "other") == begin(parent.url, "job") == "tuning"
        parent.kill()
        parent.wait_for_the_end_of_the_service()
        store = Store(f"sqlite:///{database}")
        assert {job.id: job.phase for job in stored_jobs(store)} == {
            "other": "tuning",
            "job": "ended",
        }
        told = [(event.kind, event.message) for event in store.events.of("job")]
        assert told == [("ended", "the training process was gone")]
        store.close()


@pytest.mark.slow
def test_a_training_that_ends_it_at_its_own_exit_has_ended_its_jobs(tmp_path: Path) -> None:
    """It is told to end while its parent still lives."""
    database = tmp_path / "a.db"
    with Parent(database) as parent:
        begin(parent.url, "job")
        os.kill(parent.service_pid, signal.SIGTERM)
        with suppress(requests.ConnectionError):  # once it takes none, it has begun to end
            while requests.get(f"{parent.url}/healthz", timeout=PATIENCE_SECONDS):
                time.sleep(0.01)
        time.sleep(2 * PARENT_LOOK_SECONDS)
        parent.kill()
        parent.wait_for_the_end_of_the_service()
    store = Store(f"sqlite:///{database}")
    assert store.jobs.get("job").phase == "ended"
    store.close()


@pytest.mark.slow
def test_it_ends_with_its_parent_whatever_its_database_does(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    with Parent(database) as parent:
        begin(parent.url, "job")
        with closing(sqlite3.connect(database, isolation_level=None)) as locker:
            locker.execute("BEGIN IMMEDIATE")
            parent.kill()
            # Far sooner than it would give the lock up.
            parent.wait_for_the_end_of_the_service(BUSY_SECONDS / 2)


@pytest.mark.slow
def test_a_service_that_is_ended_beside_its_parent_leaves_the_jobs_to_the_next_one(
    tmp_path: Path,
) -> None:
    database = tmp_path / "a.db"
    with ServeProcess(database, "--parent-pid", str(os.getpid())) as service:
        begin(service.url, "job")
        assert service.stop() == 0
    store = Store(f"sqlite:///{database}")
    assert store.jobs.get("job").phase == "tuning"
    store.close()


def test_a_port_in_use_is_said_to_be_and_what_it_was_set_by() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        # A training passes the variable on as an option.
        option = ("--port", port, "--database", "sqlite://")
        run = serve_until_it_fails(*option, BAGUA_SERVICE_PORT=port)
    assert run.returncode == 1
    assert f"port {port}: Address already in use" in run.stderr
    chosen = f"BAGUA_SERVICE_PORT (it is {port})"
    assert f"; choose another {chosen}, or 0 for any free one\n" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_network_needs_a_token_or_trust(tmp_path: Path) -> None:
    run = serve_until_it_fails("--host", "0.0.0.0", "--port", "0", "--database", "sqlite://")
    assert run.returncode == 2
    assert "BAGUA_AUTOTUNE_TOKEN" in run.stderr
    assert run.stderr.count("\n") == 1
    everywhere = ("--host", "0.0.0.0")
    with ServeProcess(tmp_path / "a.db", *everywhere, BAGUA_AUTOTUNE_TOKEN="open") as service:
        found_at = f"http://{socket.gethostname()}:{service.url.rpartition(':')[2]}/"
        assert f"other machines find its page at {found_at}\n" in service.log()
        jobs = f"{service.url}/api/v2/jobs"
        assert requests.get(jobs, timeout=PATIENCE_SECONDS).status_code == 401
        token = {"Authorization": "Bearer open"}
        assert requests.get(jobs, headers=token, timeout=PATIENCE_SECONDS).ok
    with ServeProcess(tmp_path / "a.db", *everywhere, "--trust-network") as service:
        assert requests.get(f"{service.url}/api/v2/jobs", timeout=PATIENCE_SECONDS).ok


@pytest.mark.parametrize(
    ("arguments", "environment", "word"),
    [
        (("--host", "no.such.host.invalid"), {}, "no.such.host.invalid"),
        ((), {"BAGUA_AUTOTUNE_MAX_SAMPLES": "many"}, "BAGUA_AUTOTUNE_MAX_SAMPLES"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    arguments: tuple[str, ...], environment: dict[str, str], word: str
) -> None:
    run = serve_until_it_fails("--port", "0", *arguments, **environment)
    assert run.returncode == 1
    assert word in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_it_deletes_old_jobs_and_finds_lost_ones_as_often_as_it_is_told_to(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    store.jobs.create("old", make_spec(), at=1.0)
    store.jobs.create("lost", make_spec(), at=time.time() - SILENT_SECONDS - 1)
    with ServeProcess(tmp_path / "a.db", "--upkeep-minutes", "0.01"):
        deadline = time.monotonic() + 60
        while [(job.id, job.phase) for job in stored_jobs(store)] != [("lost", "lost")]:
            assert time.monotonic() < deadline, "nothing was deleted, or found to be lost"
            time.sleep(0.05)
    store.close()


@pytest.mark.slow
def test_many_jobs_at_once(tmp_path: Path) -> None:
    results: dict[int, str] = {}

    def tune(url: str, number: int) -> None:
        changes = {"name": f"job {number}", "limits": {"max_samples": 8}}
        *_, last = tuning(url, f"job{number}", Ranks(number, noise=0.002), **changes)
        results[number] = last["result"]["kept"]

    with ServeProcess(tmp_path / "a.db") as service:
        threads = [threading.Thread(target=tune, args=(service.url, n)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "Traceback" not in service.log()
        assert "Warning" not in service.log()
    assert results == dict.fromkeys(range(6), "winner")


@pytest.mark.slow
def test_sigterm_in_the_middle_of_tunings_ends_it_cleanly(tmp_path: Path) -> None:
    """Requests come from all sides and Gaussian processes are fitted, as when a pod is moved."""
    trials: dict[int, int] = {}

    def tune_until_it_is_gone(url: str, number: int) -> None:
        ranks = Ranks(number, noise=0.002)
        with suppress(requests.RequestException, AssertionError):
            for state in tuning(url, f"job{number}", ranks, name=f"job {number}"):
                trials[number] = state["trial"]["index"] if state["trial"] else trials[number]

    with ServeProcess(tmp_path / "a.db") as service:
        threads = [
            threading.Thread(target=tune_until_it_is_gone, args=(service.url, number))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while min(trials.get(number, 0) for number in range(4)) < 3:
            assert time.monotonic() < deadline, f"the fourth trials did not come: {trials}"
            time.sleep(0.02)
        # Not aborted, as by a library that is amidst a fit while Python ends.
        assert service.stop() == 0
        for thread in threads:
            thread.join()
        assert "Traceback" not in service.log()
