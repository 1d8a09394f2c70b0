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


def find_binaries() -> Path | None:
    """Where initdb and pg_ctl are; Debian keeps them off the PATH."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)


@contextmanager
def running_cluster(binaries: Path) -> Iterator[str]:
    """A cluster on a free loopback port until the block ends; gives its SQLAlchemy URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="autotune-postgresql-") as folder:
        # PostgreSQL refuses to run as root.
        user = "postgres" if os.geteuid() == 0 else None
        if user:
            shutil.chown(folder, user)

        def run(program: str, *arguments: str) -> None:
            command = [str(binaries / program), "-D", f"{folder}/data", *arguments]
            subprocess.run(command, check=True, user=user, stdout=subprocess.DEVNULL, cwd=folder)

        run("initdb", "-A", "trust", "-U", "autotune")
        options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        run("pg_ctl", "start", "-w", "-o", options, "-l", f"{folder}/log")
        try:
            yield f"postgresql+pg8000://autotune@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "stop", "-m", "immediate")
