"""Every host has GPUs of its own, and nothing leads past the link between hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks.testbed import Host, Network, Testbed
from benchmarks.testbed.gpus import dealt, first, variables

pytestmark = pytest.mark.slow

# Of the ranks: NCCL reads these.
SHOW = """
import os, pathlib, sys
names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NCCL_SOCKET_IFNAME", "NCCL_HOSTID", "NCCL_NET")
names += ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE", "GLOO_SOCKET_IFNAME")
words = [os.environ[name] for name in names]
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(words))
"""


def test_gpus_are_dealt_to_the_ranks() -> None:
    assert dealt(first(2, {}), 2, 1) == [["0"], ["1"]]
    named = first(4, {"CUDA_VISIBLE_DEVICES": "4,5,6,7,8"})
    assert dealt(named, 2, 2) == [["4", "5"], ["6", "7"]]
    with pytest.raises(ValueError, match="2 ranks need a GPU each"):
        first(2, {"CUDA_VISIBLE_DEVICES": "0"})


def test_each_rank_sees_its_gpu_and_the_link(
    bridged: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "show.py").write_text(SHOW)
    with Testbed(bridged, ranks_per_node=1, gpus=True) as testbed:
        job = testbed.start([str(tmp_path / "show.py"), str(tmp_path)])
        assert job.wait(60) == 0
        found = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
        assert "NCCL_HOSTID" not in testbed.service_host.environment
    assert [words[:3] for words in found] == [["0", "0", "eth0"], ["1", "0", "eth0"]]
    assert found[0][3] != found[1][3]
    assert found[0][4:] == found[1][4:] == ["Socket", "1", "1", "0", "eth0"]


def test_ranks_on_gpus_do_not_go_before_others() -> None:
    ask = "import os; print(os.sched_getscheduler(0), os.nice(0))"
    with Testbed(Network(), ranks_per_node=1, gpus=True) as testbed:
        rank = testbed.hosts[0].popen([sys.executable, "-c", ask], hurried=True, stdout=PIPE)
        found = rank.communicate()[0].decode().split()
    assert found == [str(os.sched_getscheduler(0)), str(os.nice(0))]


def test_where_nothing_can_be_installed_unpacked_tools_do(
    bridged: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts that start them with libraries of their own: what they start does not get these."""
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if not loader.exists():
        pytest.skip("another loader than documented")
    for name in ("ip", "tc"):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nexec {loader} --library-path /none /usr/sbin/{name} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with Testbed(Network(1e9)) as testbed:
        assert testbed.fallback is None
        host: Host = testbed.hosts[0]
        seen = host.popen(["env"], stdout=PIPE).communicate()[0].decode()
    assert "LD_LIBRARY_PATH" not in seen
    assert testbed.fallback is None


def test_hosts_may_share_a_gpu() -> None:
    with Testbed(Network(), ranks_per_node=1, gpus=["3", "3"]) as testbed:
        found = [host.environment for host in testbed.hosts]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["3", "3"]
    assert found[0]["NCCL_HOSTID"] != found[1]["NCCL_HOSTID"]
    with pytest.raises(ValueError, match="2 hosts of 1 ranks, and the GPUs"):
        Testbed(Network(), ranks_per_node=1, gpus=["0"])


def test_ranks_of_one_host_may_still_talk_past_it() -> None:
    assert "NCCL_P2P_DISABLE" not in variables("host0", ["0", "1"])
    assert variables("host0", ["0", "1"])["CUDA_VISIBLE_DEVICES"] == "0,1"
