"""The same tunings by another checkout of the service, with this benchmark and this simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bagua_autotune
import bagua_simulator
from benchmarks.support.noise.jobs import Row

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "tuning.py"


def source_root() -> Path:
    """The checkout whose service this process runs."""
    return Path(bagua_autotune.__file__).resolve().parents[2]


def run(checkout: Path, arguments: Sequence[str]) -> dict[str, list[Row]]:
    """The rows of each part, of ``benchmarks/tuning.py`` with these arguments.

    Raises:
        RuntimeError: it failed, or ran another service than that of the checkout.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The truth must be the same, whatever simulator the checkout has.
        (Path(folder) / "bagua_simulator").symlink_to(Path(bagua_simulator.__file__).parent)
        paths = (Path(folder), checkout / "autotune", checkout / "client", ROOT)
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p.resolve()) for p in paths)}
        written = Path(folder) / "beside.json"
        command = [sys.executable, str(SCRIPT), *arguments, "--json", str(written)]
        if subprocess.run(command, env=variables, stdout=subprocess.DEVNULL).returncode:
            raise RuntimeError(f"the tunings of {checkout} failed")
        found = json.loads(written.read_text())
    if Path(found["service"]) != checkout.resolve():
        raise RuntimeError(f"the service of {found['service']} ran in place of that of {checkout}")
    parts: dict[str, list[Row]] = found["parts"]
    return parts


def joined(rows: Sequence[Row], others: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Both with the regret against the best of what either may choose.

    Raises:
        ValueError: they are not of the same jobs.
    """
    mine: list[Row] = []
    theirs: list[Row] = []
    for row, other in zip(rows, others, strict=True):
        for key in ("problem", "seed", "baseline_seconds"):
            if row[key] != other[key]:
                raise ValueError(f"{key}: {row[key]} beside {other[key]}; not the same job")
        best = min(row["best_seconds"], other["best_seconds"])
        mine.append({**row, "regret": row["kept_seconds"] / best - 1})
        theirs.append({**other, "regret": other["kept_seconds"] / best - 1})
    return mine, theirs
