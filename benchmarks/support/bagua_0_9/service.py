"""Starts Bagua's own service and optimiser on a host of the testbed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.testbed import Host
from benchmarks.testbed.processes import ProcessError, read_line
from tests.outside import BAGUA, PLACE

SERVE = Path(__file__).with_name("serve.py")
START_SECONDS = 120.0
"""It imports scikit-optimize, on processors that ranks of another job may share."""


def release_path() -> Path:
    """A folder for ``sys.path`` that holds ``bagua`` and a stand-in for its compiled core.

    Raises:
        RuntimeError: the release is not there.
    """
    if not (PLACE / BAGUA).exists():
        raise RuntimeError(f"{BAGUA} is not there; python -m tests.outside brings it")
    return PLACE / BAGUA


@contextmanager
def bagua_service(
    host: Host,
    world_size: int,
    folder: Path,
    *,
    confidence_seconds: float,
    warmup_seconds: float,
) -> Iterator[str]:
    """Gives ``address:port`` once the service listens; what is not given is Bagua's default.

    ``folder`` gets the service's log.

    Raises:
        RuntimeError: Bagua is not there, or its service does not start.
    """
    folder = folder.resolve()
    environment = {
        "PYTHONPATH": str(release_path()),
        "PYTHONWARNINGS": "ignore",  # Bagua was written for pydantic 1
        "WORLD_SIZE": str(world_size),
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": str(confidence_seconds),
        "BAGUA_AUTOTUNE_WARMUP_TIME_S": str(warmup_seconds),
    }
    log = folder / "bagua-service.log"
    with log.open("wb") as stderr:
        process = host.popen(
            [sys.executable, str(SERVE), "--host", host.address],
            environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
    try:
        try:
            address = read_line(process, START_SECONDS)
        except ProcessError as error:
            raise RuntimeError(f"Bagua's service {error}: {log.read_text()[-2000:]}") from None
        yield address
    finally:
        process.kill()
        process.communicate()
