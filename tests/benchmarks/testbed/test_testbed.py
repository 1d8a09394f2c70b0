"""Hosts, their links, and what runs on them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.request
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks.testbed import Host, Network, Testbed
from benchmarks.testbed.records import namespaces

SUM = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
values = torch.tensor([1.0, dist.get_rank()])
dist.all_reduce(values)
if dist.get_rank() == 0:
    json.dump(values.tolist(), open(sys.argv[1], "w"))
"""


def output(host: Host, *command: str) -> str:
    process = host.popen(command, stdout=PIPE)
    return process.communicate()[0].decode().strip()


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
        round_trip_seconds, bits_per_second = testbed.probe(seconds=0.5)
    assert round_trip_seconds >= network.round_trip_seconds
    assert bits_per_second < 51e6


def test_a_job_runs_over_the_links(network: Network, tmp_path: Path) -> None:
    script, result = tmp_path / "sum.py", tmp_path / "sum.json"
    script.write_text(SUM)
    with Testbed(network, nodes=2, ranks_per_node=1) as testbed:
        log = tmp_path / "log"
        code = testbed.start([str(script), str(result)], log=log).wait(100)
        assert code == 0, log.read_text()
        device = json.loads(output(testbed.hosts[0], "ip", "-json", "-s", "link", "show", "eth0"))
    assert json.loads(result.read_text()) == [2.0, 1.0]
    assert device[0]["stats64"]["tx"]["bytes"] > 1000


def test_when_one_host_fails_all_end(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(600)\n"
    )
    with Testbed(Network(), nodes=2, ranks_per_node=1) as testbed:
        job = testbed.start([str(script)], log=tmp_path / "log")
        assert job.wait(100) != 0


def test_a_job_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with Testbed(Network(), nodes=1, ranks_per_node=1) as testbed:
        job = testbed.start([str(script)], log=tmp_path / "log")
        with pytest.raises(TimeoutError, match="longer than 1 s"):
            job.wait(1)


def test_the_service_is_reached_over_the_network(network: Network, tmp_path: Path) -> None:
    ask = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).status)"
    with Testbed(network) as testbed:
        url = testbed.serve(tmp_path / "tuning.db", "a-token", tmp_path / "log")
        assert testbed.service_host.address in url
        assert output(testbed.hosts[0], sys.executable, "-c", ask, f"{url}/healthz") == "200"
    assert (tmp_path / "tuning.db").exists()


def test_a_service_that_cannot_start_is_told_of(tmp_path: Path) -> None:
    database = tmp_path / "tuning.db"
    database.write_text("this is no database" * 100)
    with Testbed(Network(), nodes=1) as testbed, pytest.raises(RuntimeError, match="exit code"):
        testbed.serve(database, "a-token", tmp_path / "log")


def link(folder: Path, program: str) -> None:
    path = shutil.which(program, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is not None:
        (folder / program).symlink_to(path)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all of PATH: util-linux is in it, iproute2 and a compiler are not."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("setpriv", "chrt", "nice", "true"):
        link(folder, name)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_without_iproute2_it_says_so_and_is_loopback(only: Path, tmp_path: Path) -> None:
    with Testbed(Network(1e9), nodes=2) as testbed:
        assert testbed.fallback is not None
        assert "loopback" in testbed.fallback
        assert "ip" in testbed.fallback or "root" in testbed.fallback
        assert [host.address for host in testbed.hosts] == ["127.0.0.1"] * 2
        url = testbed.serve(tmp_path / "tuning.db", "a-token", tmp_path / "log")
        with urllib.request.urlopen(f"{url}/healthz") as response:
            assert response.status == 200
    assert not testbed.folder.exists()


def test_without_a_compiler_a_delay_is_loopback(
    network: Network, only: Path, tmp_path: Path
) -> None:
    link(only, "ip")
    link(only, "tc")
    with Testbed(Network(1e9, 0.002)) as testbed:
        assert testbed.fallback is not None
        assert "C compiler" in testbed.fallback
    with Testbed(Network(1e9)) as testbed:
        assert testbed.fallback is None


def test_a_process_of_a_host_has_the_variables_of_its_network(network: Network) -> None:
    with Testbed(network) as testbed:
        lines = output(testbed.hosts[0], "env").splitlines()
    assert {"GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", "no_proxy=*"} <= set(lines)


def test_impossible_numbers_of_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 200 nodes"):
        Testbed(Network(), nodes=0)
    with pytest.raises(ValueError, match="at least one rank"):
        Testbed(Network(), ranks_per_node=0)
