"""Hosts for who is not root, in namespaces of their own; a page there is reached from here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.testbed import Network, Testbed, relay, tools

pytestmark = pytest.mark.slow

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
