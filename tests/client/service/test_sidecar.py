"""Starting a service beside the job, when that goes wrong; that it works is in tests/e2e."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch.distributed as dist

from bagua_client.environment import Environment
from bagua_client.service import sidecar as module
from bagua_client.service.breaker import Absence, Connection
from bagua_client.service.client import StepTimes
from bagua_client.service.sidecar import JobService, Sidecar, SidecarError, job_service
from bagua_client.torch_private import groups as torch_groups


def service_process() -> int:
    """The id of the process that serves beside this one."""
    (found,) = (
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and _is_service_of_ours(folder)
    )
    return found


def _is_service_of_ours(folder: Path) -> bool:
    try:
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        return parent == os.getpid() and b"bagua_autotune" in (folder / "cmdline").read_bytes()
    except OSError:  # It has ended meanwhile.
        return False


def kill_service(sidecar: Sidecar) -> int:
    """Kill the one that this process started; returns its id once it is gone."""
    process = service_process()
    os.kill(process, signal.SIGKILL)
    while sidecar.is_running:
        time.sleep(0.01)
    return process


def test_without_the_service_installed_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec

    def without_flask(name: str, *rest: Any) -> Any:
        return None if name == "flask" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_flask)
    with pytest.raises(SidecarError, match=r"'\.\[service\]' in a clone.*BAGUA_AUTOTUNE_URL"):
        Sidecar().url()


def test_a_service_that_cannot_listen_is_reported_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # It is ended where it takes too long, as on one core that others have, too.
    monkeypatch.setattr(module, "START_SECONDS", 3600.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SidecarError, match="exit code 1"):
            Sidecar(taken.getsockname()[1]).url()


def test_only_who_knows_its_token_may_ask_it() -> None:
    sidecar = Sidecar()
    try:
        jobs = f"{sidecar.url()}/api/v2/jobs"
        assert requests.get(jobs, timeout=60).status_code == 401
        shown = {"Authorization": f"Bearer {sidecar.token}"}
        assert requests.get(jobs, headers=shown, timeout=60).status_code == 200
        command = Path(f"/proc/{service_process()}/cmdline").read_text()
        assert sidecar.token not in command, "which every user of the machine can read"
    finally:
        sidecar.stop()
    assert sidecar.page_token == sidecar.token != Sidecar().token


def test_the_user_s_own_token_is_used_and_not_shown() -> None:
    sidecar = Sidecar(token="of the user")
    assert (sidecar.token, sidecar.page_token) == ("of the user", "")


def test_when_it_is_killed_one_line_says_so_and_the_job_goes_on_where_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "bagua_client")
    default = {"bucket_bytes": 1024}
    description = {
        "name": "killed",
        "world_size": 1,
        "ranks_per_node": [1],
        "tensors": [{"name": "w", "elements": 1, "bytes": 4, "dtype": "float32", "group": "f"}],
        "knobs": {"bucket_bytes": {"type": "log_integer", "low": 512, "high": 2048}},
        "default_configuration": default,
        "fingerprint": "f",
    }
    stopping = threading.Event()
    absence = Absence(0.0, lambda: False)
    connection = Connection(Environment(), "j", description, stopping, stopping.set, absence)
    shared = job_service(0)
    try:
        connection.register()
        connection.call(lambda service: service.observe(0, [StepTimes(1, [0.1])]))
        for call in (lambda: connection.call(lambda service: service.state()), connection.renew):
            before = connection.page
            kill_service(shared)
            caplog.clear()
            call()
            (line,) = [each for each in caplog.messages if "the service that rank 0" in each]
            assert "was killed by signal 9, and was started again" in line
            assert line.endswith(f"The job's page is now {connection.page}")
            assert connection.page != before
            token = {"Authorization": f"Bearer {shared.token}"}
            steps = f"{connection.url}/api/v2/jobs/j/observations"
            stored = requests.get(steps, headers=token, timeout=60).json()["observations"]
            assert [step["step"] for step in stored] == [1]
        assert not stopping.is_set()
        connection.announce_page()
    finally:
        caplog.clear()
        shared.stop()
        module._forget()
    assert caplog.messages == [
        "autotune: the page ends with the training; to see the job again, on "
        f"{socket.gethostname()}: bagua-autotune show killed, or bagua-autotune serve for its page"
    ]


def test_a_service_that_hangs_before_it_listens_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(module, "START_SECONDS", 0.2)
    with pytest.raises(SidecarError, match="exit code -9"):
        Sidecar().url()


def test_a_fork_of_the_training_has_no_service_yet() -> None:
    """Nor does it wait for the thread of its parent that was starting one."""
    parents = job_service(0)
    with module._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # a hang ends in another way
            own = job_service(0)
            os._exit(int(own is parents))
    assert os.waitpid(child, 0)[1] == 0
    assert job_service(0) is parents


def test_the_processes_of_a_job_have_one_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it ends with the process that started it."""
    store = dist.HashStore()
    monkeypatch.setattr(torch_groups, "store", lambda: store)
    first, second = JobService(), JobService()
    try:
        with ThreadPoolExecutor() as processes:
            url, other_url = processes.map(JobService.url, (first, second))
        assert url == other_url
        assert first.token == second.token == first.page_token
        assert sorted([first.is_running, second.is_running]) == [False, True]
        starter, other = (first, second) if first.is_running else (second, first)
        starter.stop()
        while starter.is_running:
            time.sleep(0.01)
        assert other.url() != url
        assert (other.is_running, other.page_token) == (True, starter.page_token)
        assert other.endings == ["ended with its process"]
        third = JobService(token="of the user")
        assert (third.url(), third.token) == (other.url(), other.token)
    finally:
        first.stop()
        second.stop()


def test_a_service_that_cannot_be_started_keeps_no_other_process_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(torch_groups, "store", lambda: store)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr(module, "START_SECONDS", 3600.0)
    for service in (JobService(), JobService()):
        with pytest.raises(SidecarError, match="could not be started"):
            service.url()


class ForgottenClaim(dist.HashStore):
    """What takes a claim back is lost, as of a process that dies before it can."""

    def set(self, key: str, value: str) -> None:
        pass


def test_a_process_that_died_before_its_service_listened_is_waited_for_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ForgottenClaim()
    monkeypatch.setattr(torch_groups, "store", lambda: store)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    monkeypatch.setattr(module, "START_SECONDS", 0.2)
    for service in (JobService(), JobService()):
        with pytest.raises(SidecarError, match="could not be started"):
            service.url()


def test_without_the_store_a_process_has_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "bagua_client")

    class Gone(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(torch_groups, "store", Gone)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SidecarError, match="could not be started"):
        JobService().url()
    assert "Connection reset by peer" in caplog.text
