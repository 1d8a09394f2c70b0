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


def _run(program: Path, *arguments: str, cwd: str | Path) -> None:
    command = [str(program), *arguments]
    subprocess.run(command, check=True, user=USER, stdout=subprocess.DEVNULL, cwd=cwd)
