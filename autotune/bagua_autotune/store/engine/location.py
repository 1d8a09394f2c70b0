"""Finds a database by the URL that the user gives; checks where a SQLite file may be.

SQLite's write-ahead log needs memory that all processes share. Network file systems do not share
it between machines: there the log is unsupported and may corrupt the file.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

import platformdirs
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from bagua_autotune.store.errors import StoreError

logger = logging.getLogger(__name__)

# Lists the mounts; on Linux only.
MOUNTINFO = Path("/proc/self/mountinfo")
ESCAPED = re.compile(r"\\([0-7]{3})")
REMOTE = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs"),
    *("lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs"),
    *("virtiofs", "wekafs"),
}
# A file system that a program serves (FUSE) may be remote, except these.
LOCAL_PROGRAMS = {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.ntfs-3g", "fuse.exfat"}
# It survives the end of the session and a restart, unlike the runtime directory and /tmp.
NODE_FOLDER = "/var/tmp/bagua-autotune-{user}"
FILE_NAME = "autotune.db"
# What is stored tells names and settings of trainings: only the service's user may read it.
FILE_MODE, FOLDER_MODE = 0o600, 0o700
EXAMPLES = "examples: sqlite:////var/lib/autotune.db, postgresql://user:password@host/name"
# pg8000 first: only with it does nobody wait without end for a server that hangs.
POSTGRESQL_DRIVERS = ("pg8000", "psycopg", "psycopg2")
SECRET = re.compile("pass|pwd|secret|token|key|credential|odbc_connect", re.IGNORECASE)


def parse(text: str) -> URL:
    """Raises StoreError, which does not repeat the text: a password may be anywhere in it."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Not chained: the cause may name a port that is part of a password.
        raise StoreError(
            f"--database (or BAGUA_AUTOTUNE_DATABASE) must be a database URL; {EXAMPLES}"
        ) from None
    # Behind a bare @ or / in a password, its rest is read as host or name, which are shown.
    others = (url.host, None if url.get_backend_name() == "sqlite" else url.database)
    if any("@" in part for part in others if part):
        raise StoreError(
            "the URL of --database (or BAGUA_AUTOTUNE_DATABASE) has one @ too many: percent-encode "
            f"those in the user and the password (@ is %40, / is %2F, : is %3A); {EXAMPLES}"
        )
    return url


def is_in_memory(url: URL) -> bool:
    """Whether it is a database of SQLite, and no file."""
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def with_driver(url: URL) -> URL:
    """The URL with the first installed driver where it names none, as ``postgresql://`` (which may
    also be spelt ``postgres://``).

    Raises:
        StoreError: no driver is installed.
    """
    if url.drivername not in ("postgresql", "postgres"):
        return url
    for driver in POSTGRESQL_DRIVERS:
        if importlib.util.find_spec(driver) is not None:
            return url.set(drivername=f"postgresql+{driver}")
    raise StoreError(
        f"the database {shown(url)} needs a driver, and none of {', '.join(POSTGRESQL_DRIVERS)} is "
        "installed: pip install pg8000"
    )


def shown(url: URL) -> str:
    """The URL with its password hidden, also one given as an option."""
    options = {key: "hidden" if SECRET.search(key) else told for key, told in url.query.items()}
    return url.set(query=options).render_as_string(hide_password=True)


def remote_file_system(folder: Path) -> str | None:
    """The type of the file system that holds the folder, if it is a network file system.

    None if it is local, or cannot be told.
    """
    try:
        mounts = MOUNTINFO.read_text(errors="surrogateescape")
    except OSError:
        return None
    kind = mounted_type(folder.resolve(), mounts)
    is_served = kind.split(".")[0] == "fuse" and kind not in LOCAL_PROGRAMS
    return kind if kind in REMOTE or is_served else None


def mounted_type(folder: Path, mountinfo: str) -> str:
    """The type of the file system below the deepest mount point that holds the folder.

    Args:
        folder: absolute, without links.
        mountinfo: the text of /proc/self/mountinfo, see proc_pid_mountinfo(5).
    """
    found, deepest = "", -1
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        # Spaces and the like are octal escapes.
        point = Path(ESCAPED.sub(lambda code: chr(int(code[1], 8)), before.split(" ")[4]))
        # Of two mounts on the same point the later one hides the other.
        if folder.is_relative_to(point) and len(point.parts) >= deepest:
            found, deepest = after.split(" ")[0], len(point.parts)
    return found


def data_folder() -> Path:
    """This user's data of ours."""
    return platformdirs.user_data_path("bagua-autotune", appauthor=False)


def _node_folder() -> Path:
    return Path(NODE_FOLDER.format(user=os.getuid()))


def default_urls() -> list[str]:
    """All that may have been the default: which one it is depends on how the disks are mounted."""
    return [f"sqlite:///{folder / FILE_NAME}" for folder in (data_folder(), _node_folder())]


def default_url() -> str:
    """A SQLite file in the user's data directory, or on this node if that is on the network."""
    home, node = data_folder(), _node_folder()
    kind = remote_file_system(home)
    if kind is None or remote_file_system(node) or not _is_private(node):
        _close_to_others(home)
        return f"sqlite:///{home / FILE_NAME}"
    rest = f"; {home / FILE_NAME} is not used" if (home / FILE_NAME).exists() else ""
    logger.warning(
        "the database is in %s, on this node only, because %s is on a network file system (%s)%s; "
        "choose another with --database",
        *(node, home, kind, rest),
    )
    return f"sqlite:///{node / FILE_NAME}"


def _close_to_others(folder: Path) -> None:
    """Make the folder private, as one that a user made may not be."""
    for path, mode in ((folder, FOLDER_MODE), (folder / FILE_NAME, FILE_MODE)):
        with suppress(OSError):  # it is missing, or another user's
            path.chmod(mode)


def make_folder(folder: Path) -> None:
    """Make the folder, if it is missing, for this user alone. Raises OSError if it cannot be."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def _is_private(folder: Path) -> bool:
    """Whether the folder, made if missing, is this user's alone: others may have made it."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    is_closed = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    return is_closed and found.st_uid == os.getuid()
