"""Where a database is: its URL as the user gives it, and where a SQLite file may stand.

SQLite's write-ahead log lives in memory that processes share, which no file system of the network
carries from one machine to the other: there it is unsupported and may corrupt the file.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import stat
from pathlib import Path

import platformdirs
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from bagua_autotune.store.errors import StoreError

logger = logging.getLogger(__name__)

# Lists what is mounted, on Linux alone.
MOUNTINFO = Path("/proc/self/mountinfo")
REMOTE = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs"),
    *("lustre", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs"),
    *("virtiofs", "wekafs"),
}
# What programs serve may come from anywhere, but for these.
LOCAL_PROGRAMS = {"fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.ntfs-3g", "fuse.exfat"}
# Not the runtime directory, which goes with the user's last session, nor /tmp, with a restart.
NODE_FOLDER = "/var/tmp/bagua-autotune-{user}"
FILE_NAME = "autotune.db"
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
            f"what --database (or BAGUA_AUTOTUNE_DATABASE) names is no database URL; {EXAMPLES}"
        ) from None
    # Of a password with a bare @ or / the rest is taken for the host or the name, which are shown.
    others = (url.host, None if url.get_backend_name() == "sqlite" else url.database)
    if any("@" in part for part in others if part):
        raise StoreError(
            "the URL of --database (or BAGUA_AUTOTUNE_DATABASE) has an @ too many: percent-encode "
            f"those of the user and the password (@ is %40, / is %2F, : is %3A); {EXAMPLES}"
        )
    return url


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
    """With the password hidden, also one that is given as an option."""
    options = {key: "hidden" if SECRET.search(key) else told for key, told in url.query.items()}
    return url.set(query=options).render_as_string(hide_password=True)


def remote_file_system(folder: Path) -> str | None:
    """The type of the file system that holds the folder, if it is one of other machines.

    None where that cannot be told: it is then taken for local.
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
        mountinfo: as proc_pid_mountinfo(5) says.
    """
    found, deepest = "", -1
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split(" ")[4]))
        # Of two on the same point the later one hides the other.
        if folder.is_relative_to(point) and len(point.parts) >= deepest:
            found, deepest = after.split(" ")[0], len(point.parts)
    return found


def default_url() -> str:
    """A SQLite file in the user's data directory, or, if the network holds that, on this node."""
    home = platformdirs.user_data_path("bagua-autotune", appauthor=False)
    kind = remote_file_system(home)
    node = Path(NODE_FOLDER.format(user=os.getuid()))
    if kind is None or remote_file_system(node) or not _is_private(node):
        return f"sqlite:///{home / FILE_NAME}"
    rest = f"; what {home / FILE_NAME} holds stays there" if (home / FILE_NAME).exists() else ""
    logger.warning(
        "the database is on this node alone, in %s, as %s is on a network file system (%s)%s; "
        "--database names another",
        *(node, home, kind, rest),
    )
    return f"sqlite:///{node / FILE_NAME}"


def _is_private(folder: Path) -> bool:
    """Whether the folder, made if it is not there, is this user's alone; anybody may make it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    is_closed = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    return is_closed and found.st_uid == os.getuid()


def _unescaped(text: str) -> str:
    """Spaces and their like are octal there."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
