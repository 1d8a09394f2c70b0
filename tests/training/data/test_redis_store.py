"""The job's own Redis servers, and Bagua's own tests of its store and its cached dataset."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.data.servers import has_redis

if not has_redis():
    pytest.skip("needs redis-py and redis-server", allow_module_level=True)

import redis

from bagua_training.data import redis_store
from bagua_training.data.redis_store import OwnServer, RedisStore

pytestmark = pytest.mark.slow

JOB = """
import json, os, sys, time
import torch.distributed as dist
from torch.utils.data import DataLoader
from bagua_training.data import CachedDataset
from bagua_training.data.redis_store import _own_servers

class Slow:
    def __getitem__(self, index):
        time.sleep(0.05)
        return index

    def __len__(self):
        return 10**6

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
redis, memory = CachedDataset(Slow()), CachedDataset(Slow(), "memory")
memory[rank]
memory.cache_loader.flush()
dist.barrier()
if rank == 1:
    input()  # Until rank 0 is killed.
    assert [redis[index] for index in range(3)] == [0, 1, 2]
    assert memory[0] == 0
    print(memory.cache_loader.statistics.hits, flush=True)
    os._exit(0)
for number, _ in enumerate(DataLoader(redis, num_workers=2, multiprocessing_context="fork")):
    if number == 10:
        server = _own_servers["redis"]
        print(json.dumps({"pid": server._process.pid, **server.host}), flush=True)
"""


def test_nothing_is_left_of_a_first_rank_that_is_killed(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    job, other = (
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(tmp_path / "store"), rank],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in "01"
    )
    assert job.stdout is not None
    server = json.loads(job.stdout.readline())
    pid = server.pop("pid")
    with redis.Redis(**server) as client:
        assert client.dbsize() >= 0
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert server["password"].encode() not in command
    job.send_signal(signal.SIGKILL)
    job.wait()
    deadline = time.monotonic() + 60
    while _is_open(server) or (Path(f"/proc/{pid}").exists() and not _is_zombie(pid)):
        assert time.monotonic() < deadline, "the server goes on"
        time.sleep(0.02)
    told, _ = other.communicate(b"\n", timeout=60)
    assert other.returncode == 0
    assert told == b"1\n"  # The memory is there until the last rank of its node has ended.
    job.stdout.read()  # To the workers' end, which torch sees to.
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "bagua" in name]


def _is_open(server: dict[str, Any]) -> bool:
    """Whether its port is, which the kernel closes when the last of its threads has ended."""
    try:
        socket.create_connection((server["host"], server["port"])).close()
    except ConnectionRefusedError:
        return False
    return True


def _is_zombie(pid: int) -> bool:
    """Whether it has ended, and nobody has asked for its status yet."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def server() -> Any:
    found = OwnServer("127.0.0.1", 10_000_000)
    yield found
    found.stop()


def test_without_the_password_it_is_refused(server: OwnServer) -> None:
    host = dict(server.host)
    with redis.Redis(**host) as client:
        assert client.ping()
    for password in (None, "guessed"):
        client = redis.Redis(**host | {"password": password})
        with pytest.raises(redis.AuthenticationError):
            client.get("1")


def test_it_listens_on_one_address_only(server: OwnServer) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.host["port"]))


def test_a_port_that_was_taken_meanwhile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [redis_store.free_port(), taken.getsockname()[1]]
        monkeypatch.setattr(redis_store, "free_port", lambda address: ports.pop())
        server = OwnServer("127.0.0.1", 10_000_000)
        server.stop()
    assert not ports


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="redis-server is not installed"):
        OwnServer("127.0.0.1", 10_000_000)


def test_no_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts is empty"):
        RedisStore(hosts=[])
