"""A PostgreSQL cluster of the tests' own, where Debian's package (or its like) is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, NullPool, create_engine
from sqlalchemy.exc import DBAPIError

# PostgreSQL refuses to run as root.
USER = "postgres" if os.geteuid() == 0 else None
# Beside other tests on few cores it takes more than the minute that pg_ctl waits by itself.
WAITS = ("-w", "-t", "600")
PORTS_TRIED = 5


def find_binaries() -> Path | None:
    """Where initdb, pg_ctl and the others are; Debian keeps them off the PATH."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@contextmanager
def running_cluster(binaries: Path) -> Iterator[str]:
    """A cluster on a free loopback port until the block ends; gives its SQLAlchemy URL."""
    with tempfile.TemporaryDirectory(prefix="autotune-postgresql-") as folder:
        if USER:
            shutil.chown(folder, USER)

        def run(program: str, *arguments: str) -> None:
            _run(binaries / program, "-D", f"{folder}/data", *arguments, cwd=folder)

        run("initdb", "-A", "trust", "-U", "autotune")

        def start(port: int) -> None:
            options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
            run("pg_ctl", "start", *WAITS, "-o", options, "-l", f"{folder}/log")

        for attempt in range(PORTS_TRIED):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            try:
                start(port)
                break
            except subprocess.CalledProcessError:  # Somebody else has taken the port since.
                if attempt == PORTS_TRIED - 1:
                    raise
        try:
            yield f"postgresql+pg8000://autotune@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "stop", "-m", "immediate")


def crash_and_restart(binaries: Path, url: str) -> None:
    """The server's processes end at once, and it begins with what its log holds."""
    with _connected(url) as connection:
        folder = Path(connection.exec_driver_sql("SHOW data_directory").scalar_one())
    restart = ("restart", *WAITS, "-m", "immediate", "-l", f"{folder.parent}/log")
    _run(binaries / "pg_ctl", "-D", str(folder), *restart, cwd=folder.parent)


def find_damage(url: str) -> list[str]:
    """What PostgreSQL's amcheck finds wrong with tables and indices, in words."""
    tables = (
        "SELECT c.oid::regclass || ': ' || msg FROM pg_class c, verify_heapam(c.oid) "
        "WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace"
    )
    indices = (
        "SELECT bt_index_check(c.oid, true) FROM pg_class c JOIN pg_am a ON a.oid = c.relam "
        "WHERE a.amname = 'btree' AND c.relnamespace = 'public'::regnamespace"
    )
    with _connected(url) as connection:
        connection.exec_driver_sql("CREATE EXTENSION IF NOT EXISTS amcheck")
        try:
            connection.exec_driver_sql(indices)
        except DBAPIError as error:
            return [str(error.orig)]
        return [str(row[0]) for row in connection.exec_driver_sql(tables)]


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        yield connection


def _run(program: Path, *arguments: str, cwd: str | Path) -> None:
    command = [str(program), *arguments]
    subprocess.run(command, check=True, user=USER, stdout=subprocess.DEVNULL, cwd=cwd)
