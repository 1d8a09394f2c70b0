"""How well the simulator predicts the gain bench: each cell's sweep from its tuning's profile.

Reads the folder that benchmarks/gain.py wrote. What a cell computes and what its network does is
fitted to the profile that its live tuning left (``bagua-autotune export JOB --profile``), and never
to the step times of the sweep, which are then foretold.

    python benchmarks/calibration.py build/gain
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cells.arms import WAYS, is_swept
from cells.goals import BEST_SIZE_EXCESS, MEDIAN_ERROR
from harness import print_table, write_json

from bagua_simulator import Cluster
from bagua_simulator.fitting import fit_record
from bagua_simulator.recorded import RecordError, load_record
from bagua_simulator.units import describe_bandwidth


@dataclass(frozen=True)
class Arm:
    """A configuration of the sweep; median of its steps, and what the simulator says.

    ``way`` is how it reduces: one of ``cells.arms.WAYS``.
    """

    name: str
    way: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        """Relative to what was measured; positive if too long was foretold."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class Calibration:
    """Of one cell.

    Attributes:
        cluster: as fitted.
        contention, launch_seconds: as fitted; see Simulator.
    """

    cell: str
    network: str
    cluster: Cluster
    contention: float
    launch_seconds: float
    arms: tuple[Arm, ...]

    @property
    def errors(self) -> list[float]:
        """Without their signs."""
        return [abs(arm.error) for arm in self.arms]

    @property
    def best(self) -> Arm:
        """The fastest as measured."""
        return min(self.arms, key=lambda arm: arm.measured_seconds)

    @property
    def foretold(self) -> Arm:
        """The fastest according to the simulator."""
        return min(self.arms, key=lambda arm: arm.predicted_seconds)

    @property
    def excess(self) -> float:
        """By how much the step of ``foretold`` is longer than that of ``best``, as measured."""
        return self.foretold.measured_seconds / self.best.measured_seconds - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "network": self.network,
            "median_error": median(self.errors),
            "worst_error": max(self.errors),
            "best": self.best.name,
            "foretold": self.foretold.name,
            "excess": self.excess,
            "cluster": asdict(self.cluster),
            "contention": self.contention,
            "launch_seconds": self.launch_seconds,
            "arms": [{**asdict(arm), "error": arm.error} for arm in self.arms],
        }


def calibrate(result: Mapping[str, Any], profile: Path) -> Calibration:
    """Foretell the sweep of a cell.

    Args:
        result: the JSON of the cell.
        profile: what its tuning left.

    Raises:
        RecordError: ``profile`` cannot be used.
        ValueError: no network can be fitted to it, or the cell has nothing to compare it with.
    """
    if result["fallback"]:
        raise ValueError(f"it ran over loopback: {result['fallback']}")
    simulator = fit_record(load_record(profile))
    measured = result["sweep"]["arms"]
    arms = tuple(
        Arm(
            name,
            WAYS[arm["configuration"]["hierarchical"]],
            median(seconds for block in measured[name] for seconds in block),
            simulator.step_seconds(_knobs(arm["configuration"])),
        )
        for name, arm in result["arms"].items()
        if is_swept(arm) and name in measured
    )
    if not arms:
        raise ValueError("no arm of its sweep was measured")
    cell = result["cell"]
    return Calibration(
        cell["name"],
        cell["network"],
        simulator.cluster,
        simulator.contention,
        simulator.launch_seconds,
        arms,
    )


def _knobs(configuration: Mapping[str, Any]) -> dict[str, Any]:
    return {
        knob: tuple(value) if isinstance(value, list) else value
        for knob, value in configuration.items()
    }


def calibrate_folder(folder: Path) -> list[Calibration]:
    """Every cell of the bench's folder that can be foretold; the others are named."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return calibrate_all([each for each in documents if "cell" in each], folder)


def calibrate_all(results: Sequence[Mapping[str, Any]], folder: Path) -> list[Calibration]:
    """The cells of these JSON documents of the bench's folder; see ``calibrate_folder``."""
    found = []
    for result in results:
        name = result["cell"]["name"]
        try:
            found.append(calibrate(result, folder / name / "profile.json"))
        except (RecordError, ValueError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr, flush=True)
    return found


def document(cells: Sequence[Calibration]) -> dict[str, Any]:
    """For gain.py: errors over the arms of all cells, of each way of reducing, and each cell."""
    errors = [error for cell in cells for error in cell.errors]
    return {
        "benchmark": "calibration",
        "median_error": median(errors),
        "worst_error": max(errors),
        "worst_excess": max(cell.excess for cell in cells),
        "ways": {
            way: {"median_error": median(errors), "worst_error": max(errors)}
            for way, errors in _by_way(cells).items()
        },
        "cells": [cell.to_json() for cell in cells],
    }


def _by_way(cells: Sequence[Calibration]) -> dict[str, list[float]]:
    """Errors without their signs, over the arms of all cells."""
    arms = [arm for cell in cells for arm in cell.arms]
    ways = dict.fromkeys(arm.way for arm in arms)
    return {way: [abs(arm.error) for arm in arms if arm.way == way] for way in ways}


def show(cells: Sequence[Calibration]) -> None:
    """Each cell, each network, each way of reducing, and whether the goals are met."""
    header = ["cell", "median error", "worst", "at", "simulator's best", "true best", "loss"]
    header += ["bandwidth", "contention"]
    print_table(header, [_row(cell) for cell in cells])
    print()
    rows = []
    for network in dict.fromkeys(cell.network for cell in cells):
        members = [cell for cell in cells if cell.network == network]
        excess = max(cell.excess for cell in members)
        errors = _errors(error for cell in members for error in cell.errors)
        rows.append([network, *errors, f"{excess:.1%}"])
    print_table(["network", "median error", "worst", "largest loss"], rows)
    print()
    rows = [[way, *_errors(errors)] for way, errors in _by_way(cells).items()]
    print_table(["way of reducing", "median error", "worst"], rows)
    print()
    found = document(cells)
    for what, value, most in (
        ("median error", found["median_error"], MEDIAN_ERROR),
        ("loss of the simulator's best in the worst cell", found["worst_excess"], BEST_SIZE_EXCESS),
    ):
        verdict = "met" if value <= most else "MISSED"
        print(f"{what} at most {most:.0%}: {value:.1%}: {verdict}")


def _errors(errors: Iterable[float]) -> list[str]:
    """Two columns: their median, and the worst."""
    found = list(errors)
    return [f"{median(found):.1%}", f"{max(found):.1%}"]


def _row(cell: Calibration) -> list[str]:
    worst = max(cell.arms, key=lambda arm: abs(arm.error))
    return [
        cell.cell,
        f"{median(cell.errors):.1%}",
        f"{worst.error:+.1%}",
        worst.name,
        cell.foretold.name,
        cell.best.name,
        f"{cell.excess:.1%}",
        describe_bandwidth(cell.cluster.bandwidth_bytes_per_second),
        f"{cell.contention:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder that gain.py wrote")
    parser.add_argument(
        "--json", type=Path, help="write figures to this file (default: calibration.json in folder)"
    )
    options = parser.parse_args()
    cells = calibrate_folder(options.folder)
    if not cells:
        sys.exit(f"calibration.py: {options.folder} holds no cell with a profile")
    show(cells)
    write_json(options.json or options.folder / "calibration.json", document(cells))


if __name__ == "__main__":
    main()
