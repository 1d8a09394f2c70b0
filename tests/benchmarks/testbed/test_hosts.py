"""Hosts have GPUs of their own, and nothing leads past the link between them; who is not root has
hosts in namespaces of his own, and a page there is reached from here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from subprocess import PIPE

import pytest

from benchmarks.testbed import Host, Network, Testbed, relay, tools
from benchmarks.testbed.host import dealt_gpus, first_gpus, gpu_variables

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
    assert dealt_gpus(first_gpus(2, {}), 2, 1) == [["0"], ["1"]]
    named = first_gpus(4, {"CUDA_VISIBLE_DEVICES": "4,5,6,7,8"})
    assert dealt_gpus(named, 2, 2) == [["4", "5"], ["6", "7"]]
    with pytest.raises(ValueError, match="2 ranks need a GPU each"):
        first_gpus(2, {"CUDA_VISIBLE_DEVICES": "0"})


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
    assert "NCCL_P2P_DISABLE" not in gpu_variables("host0", ["0", "1"])
    assert gpu_variables("host0", ["0", "1"])["CUDA_VISIBLE_DEVICES"] == "0,1"


ROOT = Path(__file__).parents[3]
# This very user under another number, with no rights: what an ordinary user has.
ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
PROGRAM = """
import os, sys, urllib.request
from benchmarks.testbed import Network, Testbed, relay, rootless
assert os.geteuid() == 0 or rootless.USER not in os.environ
listening = relay.listener()
rootless.enter(listening)
with Testbed(Network.parse(sys.argv[1]), nodes=2) as testbed:
    records = testbed._record.path.parent.name
    print(testbed.fallback or "hosts", rootless.user(), records, flush=True)
    page = testbed.publish(testbed.serve(testbed.folder / "tuning.db", "a-token"), listening)
    print(page, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def ordinary() -> tuple[str, ...]:
    if subprocess.run([*ORDINARY, "unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("this kernel has no namespaces for ordinary users")
    return ORDINARY


def test_an_ordinary_user_has_hosts_and_their_page(
    ordinary: tuple[str, ...], tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with subprocess.Popen(
        [*ordinary, sys.executable, str(script), "1gbit-1ms"],
        cwd=ROOT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT)}
        | {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if said[:1] != ["hosts"]:
            process.communicate("\n")
            pytest.skip(" ".join(said))
        assert said == ["hosts", "1000", "bagua-testbed-1000"]
        with urllib.request.urlopen(f"{process.stdout.readline().strip()}/healthz") as response:
            assert response.status == 200
        process.communicate("\n")
        assert process.returncode == 0
    assert not list((tmp_path / "cache").rglob("tuning.db"))


def test_a_page_is_reached_past_the_hosts(bridged: Network, tmp_path: Path) -> None:
    with relay.listener() as listening, Testbed(bridged, nodes=1) as testbed:
        url = testbed.serve(tmp_path / "tuning.db", "a-token")
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{url}/healthz", timeout=1)
        page = testbed.publish(url, listening)
        for _ in range(2):
            with urllib.request.urlopen(f"{page}/healthz", timeout=10) as response:
                assert response.status == 200


def test_what_only_roots_path_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's tc, for one."""
    if shutil.which("tc", path=tools.SYSTEM_FOLDERS) is None:
        pytest.skip("tc is not installed, or somewhere else")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert "tc" in tools.run("tc", "-Version")
