"""What is kept of a cell beside its figures.

Under which conditions it was measured: the link as it is, the machine, its load. And what the
service stored of a tuned job, through the product's own ``export`` command.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
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


def export_job(database: Path, job: str, folder: Path) -> dict[str, Any]:
    """Write ``job.json`` and ``profile.json`` to ``folder``; return what a cell keeps of it.

    Raises:
        subprocess.CalledProcessError: there is no such job in the database.
    """
    source = ["--database", f"sqlite:///{database}"]
    (folder / "job.json").write_text(_export(job, "--json", *source))
    try:
        (folder / "profile.json").write_text(_export(job, "--profile", *source))
    except subprocess.CalledProcessError as error:
        # A tuning that ended before any step was profiled; only the simulator misses it.
        print(f"{job}: no profile: {error.stderr.strip()}", flush=True)
    return digest(json.loads((folder / "job.json").read_text()))


def with_stored(
    tuning: Mapping[str, Any], database: Path, job: str, folder: Path
) -> dict[str, Any]:
    """What the job of a tuning wrote, with what the service stored of it; see export_job. A tuning
    that did not end left its job at some trial: the best configuration until then stands for it.
    """
    stored = export_job(database, job, folder)
    found = tuning["configuration"]
    best = found if tuning["ended"] else {**found, **stored["best"]}
    return {**tuning, "configuration": best, "stored": stored}


def digest(document: Mapping[str, Any]) -> dict[str, Any]:
    """State, result, the best configuration by now, and the trials of the first tuning."""
    return {
        "state": document["state"],
        "best": document["progress"]["incumbent"] or document["default_configuration"],
        "round": document["round"],
        "result": document["result"],
        "trials": [trial for trial in document["trials"] if trial["round"] == 0],
    }


def _export(job: str, *options: str) -> str:
    command = [sys.executable, "-m", "bagua_autotune", "export", job, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tail(log: Path) -> str:
    """The end of a log, indented; empty if there is none."""
    if not log.exists():
        return ""
    return "\n".join("    " + line for line in log.read_text(errors="replace").splitlines()[-20:])
