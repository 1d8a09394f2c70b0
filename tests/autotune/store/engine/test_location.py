"""SQLite's file on file systems of other machines, by what Linux says is mounted."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import pytest
from sqlalchemy import make_url

from bagua_autotune.store import Store
from bagua_autotune.store.engine import location
from bagua_autotune.store.engine.location import parse, shown, with_driver
from bagua_autotune.store.errors import StoreError
from tests.autotune.support import make_spec

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /home rw,relatime shared:9 - autofs systemd-1 rw
31 30 0:41 / /home/ada rw,relatime shared:10 master:2 - nfs4 server:/home/ada rw,vers=4.2
32 31 254:1 / /home/ada/scratch rw - xfs /dev/vdb rw
33 27 0:42 / /mnt/two\040words rw - lustre 10.0.0.1@tcp:/work rw
34 27 0:43 / /srv rw - ext4 /dev/vdc rw
35 27 0:44 / /srv rw - fuse.sshfs ada@host:/srv rw
36 27 0:45 / /var/lib/layers rw - fuse.fuse-overlayfs fuse-overlayfs rw
""".strip()


@pytest.mark.parametrize(
    ("folder", "kind", "is_remote"),
    [
        ("/", "ext4", False),
        ("/home/ada/.local/share", "nfs4", True),
        ("/home/adam", "autofs", False),
        ("/home/ada/scratch/x", "xfs", False),
        ("/mnt/two words/x", "lustre", True),
        ("/srv/x", "fuse.sshfs", True),
        ("/var/lib/layers/x", "fuse.fuse-overlayfs", False),
    ],
)
def test_the_deepest_and_latest_mount_holds_a_folder(
    folder: str, kind: str, is_remote: bool, mounted: Path
) -> None:
    mounted.write_text(MOUNTINFO)
    assert location.mounted_type(Path(folder), MOUNTINFO) == kind
    assert location.remote_file_system(Path(folder)) == (kind if is_remote else None)


def test_without_a_list_of_mounts_all_is_local(mounted: Path) -> None:
    assert location.remote_file_system(Path("/")) is None


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is mounted, to be written."""
    monkeypatch.setattr(location, "MOUNTINFO", tmp_path / "mountinfo")
    return tmp_path / "mountinfo"


def journal_mode(url: str) -> str:
    connection = sqlite3.connect(str(make_url(url).database))
    mode: str = connection.execute("PRAGMA journal_mode").fetchone()[0]
    connection.close()
    return mode


def test_the_default_is_on_this_node_where_the_home_is_not(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = tmp_path / "node"
    monkeypatch.setattr(location, "NODE_FOLDER", str(node))
    home = tmp_path / "data"
    mounted.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {home} rw - nfs4 b rw\n")
    url = location.default_url()
    assert url == f"sqlite:///{node}/autotune.db"
    assert node.stat().st_mode & 0o777 == 0o700
    (record,) = caplog.records
    assert str(node) in record.message
    assert "(nfs4)" in record.message
    assert "is not used" not in record.message
    Store(url).close()
    assert journal_mode(url) == "wal"
    (home / "bagua-autotune").mkdir(parents=True)
    (home / "bagua-autotune" / "autotune.db").touch()
    location.default_url()
    assert "is not used" in caplog.records[-1].message


def test_the_default_is_at_home_where_that_is_local(
    mounted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mounted.write_text("1 0 0:1 / / rw - ext4 a rw\n")
    assert location.default_url() == f"sqlite:///{tmp_path}/data/bagua-autotune/autotune.db"
    assert not caplog.records


def test_what_an_earlier_release_let_others_read_is_closed(mounted: Path, tmp_path: Path) -> None:
    mounted.write_text("1 0 0:1 / / rw - ext4 a rw\n")
    folder = tmp_path / "data" / "bagua-autotune"
    folder.mkdir(parents=True, mode=0o755)
    (folder / "autotune.db").touch(mode=0o644)
    location.default_url()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "autotune.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_folder_that_others_may_have_made_is_not_used(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    node, home = tmp_path / "node", tmp_path / "data"
    monkeypatch.setattr(location, "NODE_FOLDER", str(node))
    mounted.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {home} rw - nfs4 b rw\n")
    if kind == "open to others":
        node.mkdir()
        node.chmod(0o770)
    elif kind == "a link":
        node.symlink_to(tmp_path)
    else:
        node.touch()
    assert location.default_url() == f"sqlite:///{home}/bagua-autotune/autotune.db"


def test_a_named_database_on_a_network_has_no_write_ahead_log(
    mounted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path}/autotune.db"
    mounted.write_text("1 0 0:1 / / rw - ext4 a rw\n")
    Store(url).close()
    assert journal_mode(url) == "wal"
    assert not caplog.records
    mounted.write_text("1 0 0:1 / / rw - cifs a rw\n")
    store = Store(url)
    assert store.jobs.create("job", make_spec(), at=1.0)
    store.close()
    assert journal_mode(url) == "delete"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"sqlite:///{tmp_path}/autotune.db is on a network file system (cifs)" in record.message
    Store(url, as_found=True).close()
    assert len(caplog.records) == 1


def test_one_that_another_process_uses_with_its_log_is_refused_there(
    mounted: Path, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/autotune.db"
    mounted.write_text("1 0 0:1 / / rw - ext4 a rw\n")
    local = Store(url)
    mounted.write_text("1 0 0:1 / / rw - nfs a rw\n")
    with local.database.reading(), pytest.raises(StoreError, match="another process uses it"):
        Store(url)
    local.close()


@pytest.mark.skipif(
    shutil.which("bindfs") is None or os.geteuid() != 0, reason="needs bindfs, and root to mount"
)
def test_a_mounted_file_system_that_a_program_serves_is_foreign(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    behind, point = tmp_path / "behind", tmp_path / "point"
    behind.mkdir()
    point.mkdir()
    subprocess.run(["bindfs", str(behind), str(point)], check=True)
    try:
        url = f"sqlite:///{point}/new/autotune.db"
        Store(url).close()
        assert journal_mode(url) == "delete"
        assert "(fuse)" in caplog.text or "(fuse.bindfs)" in caplog.text
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.parametrize(
    "text",
    [
        "postgresql+pg8000:/user:hunter2@host/db",
        "postgresql+pg8000:user:hunter2@host/db",
        "user:hunter2@host/db",
        "postgresql+pg8000://user@host:hunter2/db",
        "postgresql+pg8000://user:hunter2/db",
        "postgresql+pg8000://user:p@hunter2@host/db",
        "postgresql+pg8000://user:p@ss/hunter2@host/db",
        "postgresql+pg8000:///user:hunter2@host/db",
        "",
    ],
)
def test_what_is_no_url_is_not_repeated(text: str) -> None:
    """A password in the wrong place must not get into the log."""
    with pytest.raises(StoreError, match=r"BAGUA_AUTOTUNE_DATABASE.*postgresql://") as told:
        Store(text)
    assert "hunter2" not in str(told.value)
    assert told.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("postgresql+pg8000://u:hunter2@h:5432/db", "postgresql+pg8000://u:***@h:5432/db"),
        ("postgresql+pg8000://u:p%40hunter2@h/db", "postgresql+pg8000://u:***@h/db"),
        ("postgresql://h/db?password=hunter2&user=u", "postgresql://h/db?password=hidden&user=u"),
        ("postgresql://h/db?sslPassword=hunter2", "postgresql://h/db?sslPassword=hidden"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dhunter2", "mssql+pyodbc:///?odbc_connect=hidden"),
        ("sqlite:////data/me@home.db", "sqlite:////data/me%40home.db"),
        ("sqlite:///a.db?mode=ro&timeout=3", "sqlite:///a.db?mode=ro&timeout=3"),
    ],
)
def test_it_is_shown_without_its_password(text: str, without: str) -> None:
    assert shown(parse(text)) == without


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
@pytest.mark.parametrize(
    ("installed", "driver"),
    [
        ({"pg8000", "psycopg", "psycopg2"}, "pg8000"),
        ({"psycopg", "psycopg2"}, "psycopg"),
        ({"psycopg2"}, "psycopg2"),
    ],
)
def test_a_server_is_reached_with_the_driver_that_is_installed(
    scheme: str, installed: set[str], driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    url = with_driver(parse(f"{scheme}://user:p%40ss@host/name"))
    assert url == make_url(f"postgresql+{driver}://user:p%40ss@host/name")


def test_a_driver_that_is_named_is_taken() -> None:
    url = parse("postgresql+psycopg://user@host/name")
    assert with_driver(url) == url


def test_a_server_without_any_driver_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"is installed: pip install pg8000$") as told:
        Store("postgresql://user:hunter2@host/name")
    assert "postgresql://user:***@host/name needs a driver" in str(told.value)


def test_a_server_without_a_named_driver_serves(postgresql_url: str) -> None:
    store = Store(postgresql_url.replace("+pg8000", ""))
    store.check()
    store.close()


def test_a_database_that_cannot_be_reached_is_named_without_its_password() -> None:
    url = "postgresql+pg8000://user:hunter2@127.0.0.1:1/db?password=hunter2"
    with pytest.raises(StoreError, match=r"user:\*\*\*@127.0.0.1:1/db.*cannot be used") as told:
        Store(url)
    assert "hunter2" not in str(told.value)
