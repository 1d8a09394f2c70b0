"""Hosts, their links, and what runs on them; and what `make demo` says of them before it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

from benchmarks.testbed import Host, Network, Testbed, records
from benchmarks.testbed.records import namespaces, started
from examples.demo import introduction, made
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SUM = """
import json, os, pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
values = torch.tensor([1.0, dist.get_rank()])
dist.all_reduce(values)
print("a rank was here")
if dist.get_rank() == 0:
    sent_bytes = int(open("/sys/class/net/eth0/statistics/tx_bytes").read())
    results = pathlib.Path(os.environ["BAGUA_TESTBED_RESULTS"])
    (results / "sum.json").write_text(json.dumps([*values.tolist(), sent_bytes]))
    (results / "broken.json").write_text("{")
"""
# Rank 1 fails as soon as rank 0 is there.
FAIL = """
import os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)
while not path.exists():
    time.sleep(0.01)
sys.exit(3)
"""


def output(host: Host, *command: str) -> str:
    process = host.popen(command, stdout=PIPE)
    return process.communicate()[0].decode().strip()


def ours() -> list[int]:
    """Processes of the runs of this one."""
    of_us = [record for record in records.read()[0] if record.owner == os.getpid()]
    return [pid for record in of_us for pid in record.processes()]


def assert_some_run(number: int) -> None:
    """A process that becomes another program has no variables for a moment."""
    wait_until(lambda: len(ours()) >= number, f"{number} processes")


def assert_all_end() -> None:
    """What follows a killed parent does so a little later."""
    wait_until(lambda: not ours(), "the end of all")


def test_each_host_has_one_link_of_its_own(network: Network) -> None:
    before = os.listdir("/sys/class/net")
    with Testbed(network) as testbed:
        hosts = [*testbed.hosts, testbed.service_host]
        for host in hosts:
            links = json.loads(output(host, "ip", "-json", "address"))
            assert {link["ifname"] for link in links} == {"lo", "eth0"}
            (eth0,) = (link for link in links if link["ifname"] == "eth0")
            assert host.address in [address["local"] for address in eth0["addr_info"]]
        assert len({host.address for host in hosts}) == 3
        assert os.listdir("/sys/class/net") == before
        names = [host.namespace for host in hosts]
        assert set(names) <= set(namespaces())
    assert not set(names) & set(namespaces())
    assert not testbed.folder.exists()


def test_a_link_is_neither_faster_nor_shorter_than_was_asked(network: Network) -> None:
    """How close it comes is the bench's business: a busy machine only makes it slower."""
    with Testbed(Network(50e6, network.round_trip_seconds)) as testbed:
        if testbed.fallback is not None:
            pytest.skip(testbed.fallback)  # a kernel without tbf
        round_trip_seconds, bits_per_second = testbed.probe(seconds=0.5)
    assert round_trip_seconds >= network.round_trip_seconds
    # After a pause of the receiver, what its link held comes at once.
    assert bits_per_second < 60e6


def test_a_job_runs_over_the_links_and_what_it_found_can_be_piped(
    switched: Network, tmp_path: Path
) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "before.json").write_text("[]")
    options = ["--network", str(switched), "--ranks-per-node", "1", "--results", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.testbed", "run", *options, "--", tmp_path / "sum.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (*sums, sent_bytes) = json.loads(done.stdout)["sum.json"]
    assert sums == [2.0, 1.0]
    assert sent_bytes > 1000
    assert list(json.loads(done.stdout)) == ["sum.json"]
    assert done.stderr.count("a rank was here") == 2
    assert str(tmp_path / "broken.json") in done.stderr


def test_when_one_host_fails_all_end(tmp_path: Path) -> None:
    script, path = tmp_path / "fail.py", tmp_path / "pid"
    script.write_text(FAIL)
    with Testbed(Network(), nodes=2, ranks_per_node=1) as testbed:
        job = testbed.start([str(script), str(path)], log=tmp_path / "log")
        assert_some_run(2)
        assert job.wait(100) != 0
        assert_all_end()
    assert started(int(path.read_text())) is None


def test_a_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with Testbed(Network(), nodes=1, ranks_per_node=1) as testbed:
        job = testbed.start([str(script)], log=tmp_path / "log")
        assert_some_run(1)
        with pytest.raises(TimeoutError, match="longer than 1 s"):
            job.wait(1)
        assert_all_end()


def test_the_service_is_reached_over_the_network(switched: Network, tmp_path: Path) -> None:
    ask = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).status)"
    with Testbed(switched) as testbed:
        url = testbed.serve(tmp_path / "tuning.db", "a-token", tmp_path / "log")
        assert testbed.service_host.address in url
        assert output(testbed.hosts[0], sys.executable, "-c", ask, f"{url}/healthz") == "200"
    assert (tmp_path / "tuning.db").exists()


@pytest.mark.usefixtures("only")
def test_without_iproute2_it_says_so_and_is_loopback(tmp_path: Path) -> None:
    with Testbed(Network(1e9), nodes=2) as testbed:
        assert testbed.fallback is not None
        assert "loopback" in testbed.fallback
        assert "ip" in testbed.fallback or "root" in testbed.fallback
        assert [host.address for host in testbed.hosts] == ["127.0.0.1"] * 2
        url = testbed.serve(tmp_path / "tuning.db", "a-token", tmp_path / "log")
        with urllib.request.urlopen(f"{url}/healthz") as response:
            assert response.status == 200
    assert not testbed.folder.exists()


@pytest.mark.usefixtures("iproute2")
def test_without_a_compiler_a_delay_is_loopback(bridged: Network) -> None:
    with Testbed(Network(round_trip_seconds=0.002)) as testbed:
        assert testbed.fallback is not None
        assert "C compiler" in testbed.fallback
    with Testbed(bridged) as testbed:
        assert testbed.fallback is None


@pytest.mark.usefixtures("only")
def test_at_ordinary_priority_nobody_waits_for_the_ranks() -> None:
    ask = "import os; print(os.sched_getscheduler(0), os.nice(0))"
    with Testbed(Network(), ordinary_priority=True) as testbed:
        rank = testbed.hosts[0].popen([sys.executable, "-c", ask], hurried=True, stdout=PIPE)
        found = rank.communicate()[0].decode().split()
    assert found == [str(os.sched_getscheduler(0)), str(os.nice(0))]


def test_a_process_of_a_host_has_the_variables_of_its_network(bridged: Network) -> None:
    with Testbed(bridged) as testbed:
        lines = output(testbed.hosts[0], "env").splitlines()
    assert {"GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", "no_proxy=*"} <= set(lines)


def test_impossible_numbers_of_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 200 nodes"):
        Testbed(Network(), nodes=0)
    with pytest.raises(ValueError, match="at least one rank"):
        Testbed(Network(), ranks_per_node=0)


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (0, "Emulated link of 200 Mbit/s between two hosts of two ranks on this machine."),
        (1, "Emulated link of 10 Gbit/s between two hosts of one rank on this machine, which share its GPU."),  # noqa: E501
        (2, "Emulated link of 10 Gbit/s between two hosts of one rank on this machine, each with a GPU."),  # noqa: E501
    ],
)  # fmt: skip
def test_it_names_the_emulated_link(
    bridged: Network, monkeypatch: pytest.MonkeyPatch, gpus: int, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with made() as testbed:
        assert introduction(testbed) == said
        seen = [host.environment.get("CUDA_VISIBLE_DEVICES") for host in testbed.hosts]
        assert seen == [[None, None], ["0", "0"], ["0", "1"]][gpus]


def test_without_hosts_it_says_so_and_why(only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lacks = "ip is not installed"
    if os.geteuid() != 0:
        lacks = "this kernel lets only root make network namespaces"
    with made() as testbed:
        assert introduction(testbed) == (
            "No emulated link here, and maybe nothing to gain: loopback instead of hosts with a "
            f"network of their own: {lacks}."
        )
        assert len(testbed.hosts) == 2
