"""Under which conditions a cell was measured: the link as it is, the machine, its load."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.testbed import Testbed

PROBE_SECONDS = 1.0


def conditions(testbed: Testbed) -> dict[str, Any]:
    """Before the measuring; ``load_after`` is for the end.

    Raises:
        RuntimeError: the hosts do not reach each other.
    """
    link = None
    if not testbed.fallback and testbed.nodes > 1:
        round_trip, rate = testbed.probe(PROBE_SECONDS)
        link = {"round_trip_seconds": round_trip, "bits_per_second": rate}
    return {
        "link": link,
        "kernel": platform.release(),
        "processor": processor(),
        "commit": commit(),
        "load_before": os.getloadavg(),
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Its name, if Linux tells."""
    if not cpuinfo.exists():
        return None
    names = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
    return next((name.partition(":")[2].strip() for name in names), None)


def commit() -> str | None:
    """Of this checkout, with a plus if it was changed since; None if it is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip()[:12] + ("+" if changed.stdout else "")
