"""What the service stored of a tuned job, through the product's own ``export`` command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def export_job(database: Path, job: str, folder: Path) -> dict[str, Any]:
    """Write ``job.json`` and ``profile.json`` to ``folder``; return what a cell keeps of it.

    Raises:
        subprocess.CalledProcessError: there is no such job in the database.
    """
    source = ["--database", f"sqlite:///{database.resolve()}"]
    (folder / "job.json").write_text(_export(job, "--json", *source))
    try:
        (folder / "profile.json").write_text(_export(job, "--profile", *source))
    except subprocess.CalledProcessError as error:
        # A tuning that ended before any step was profiled; only the simulator misses it.
        print(f"{job}: no profile: {error.stderr.strip()}", flush=True)
    return digest(json.loads((folder / "job.json").read_text()))


def digest(document: Mapping[str, Any]) -> dict[str, Any]:
    """State, result, trials, and the steps of the first tuning from first to last switch."""
    trials = [trial for trial in document["trials"] if trial["round"] == 0]
    return {
        "state": document["state"],
        "round": document["round"],
        "result": document["result"],
        "trials": trials,
        "switch_steps": _switch_steps(document["events"], trials),
    }


def _switch_steps(events: Sequence[Mapping[str, Any]], trials: Sequence[Any]) -> int | None:
    """Steps from the first to the last switch; None where the ranks told of none."""
    first_round = {trial["index"] for trial in trials} | {None}
    steps = [
        event["step"]
        for event in events
        if event["kind"] == "switched"
        and event["step"] is not None
        and event["trial"] in first_round
    ]
    return max(steps) - min(steps) if steps else None


def _export(job: str, *options: str) -> str:
    command = [sys.executable, "-m", "bagua_autotune", "export", job, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def tail(log: Path, lines: int = 20) -> str:
    """The end of a log, indented; empty if there is none."""
    if not log.exists():
        return ""
    return "\n".join(
        "    " + line for line in log.read_text(errors="replace").splitlines()[-lines:]
    )
