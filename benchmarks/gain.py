"""The gain over stock DDP, Bagua's default and its tuner: real jobs on hosts of one machine."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibration import calibrate_all, document
from cells.arms import FULL, SMOKE, Effort
from cells.cell import DEFAULT_BAGUA, DEFAULT_MODELS, DEFAULT_NETWORKS, MODELS, Cell, grid
from cells.figures import Figures, figures_of
from cells.goals import goals
from cells.plot import plot_networks
from cells.report import headline, show
from cells.run import CellError, run_cell
from harness import write_json

SMOKE_FIELDS: dict[str, Any] = {"smoke": True, "gradient_bytes": 4_000_000, "compute_seconds": 0.1}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(DEFAULT_MODELS), metavar="MODEL",
                        help=f"of {', '.join(MODELS)}")  # fmt: skip
    parser.add_argument(
        "--networks",
        nargs="+",
        default=list(DEFAULT_NETWORKS),
        metavar="NETWORK",
        help="such as 300mbit, 1gbit, 1gbit-2ms (round trip), unshaped",
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--gradient-megabytes", type=float, default=20.0)
    parser.add_argument("--compute-seconds", type=float, default=0.3, help="of a step, slept")
    parser.add_argument("--bagua", nargs="*", metavar="MODEL/NETWORK",
                        help="cells that Bagua's own service tunes too "
                        f"(default: {', '.join(DEFAULT_BAGUA)})")  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeat", type=int, default=1, help="runs of each cell")
    parser.add_argument("--sweep-rounds", type=int, default=FULL.sweep_rounds)
    parser.add_argument("--run-off-rounds", type=int, default=FULL.run_off_rounds)
    parser.add_argument("--output", type=Path, default=Path("build/gain"), metavar="FOLDER")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the cells that are done, as they are asked for now",
    )
    parser.add_argument("--smoke", action="store_true",
                        help="one small cell in a minute; its figures mean nothing")  # fmt: skip
    parser.add_argument("--report", action="store_true",
                        help="run nothing: the figures of all cells in FOLDER")  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="draw there (needs the extra plot)"
    )
    return parser.parse_args(argv)


def chosen_cells(options: argparse.Namespace) -> tuple[list[Cell], Effort]:
    """Raises ValueError for a model or a cell that there is not."""
    places = [f"{model}/{network}" for model in options.models for network in options.networks]
    shape: dict[str, Any] = {"nodes": options.nodes, "ranks_per_node": options.ranks_per_node}
    if options.smoke:
        bagua = options.bagua or []
        return grid(options.models[:1], ["1gbit"], bagua, **shape, **SMOKE_FIELDS), SMOKE
    bagua = options.bagua
    if bagua is None:
        bagua = [place for place in DEFAULT_BAGUA if place in places]
    fields: dict[str, Any] = {
        **shape,
        "gradient_bytes": round(1e6 * options.gradient_megabytes),
        "compute_seconds": options.compute_seconds,
        "device": options.device,
    }
    effort = Effort(sweep_rounds=options.sweep_rounds, run_off_rounds=options.run_off_rounds)
    return grid(options.models, options.networks, bagua, options.repeat, **fields), effort


def run_all(cells: Sequence[Cell], effort: Effort, output: Path, resume: bool) -> dict[str, str]:
    """One after the other; a cell that fails is reported and the others go on. The failures."""
    failures: dict[str, str] = {}
    for number, cell in enumerate(cells, 1):
        path = output / f"{cell.name}.json"
        where = f"[{number}/{len(cells)}] {cell.name}"
        if resume and path.exists() and json.loads(path.read_text())["cell"] == cell.to_json():
            print(f"{where}: done before", flush=True)
            continue
        path.unlink(missing_ok=True)
        print(f"{where}: begins {time.strftime('%H:%M:%S')}", flush=True)
        began = time.monotonic()
        try:
            found = figures_of(json.loads(run_cell(cell, effort, output).read_text()))
        except Exception as error:  # whatever it is, the other cells take hours
            if not isinstance(error, CellError):
                traceback.print_exc()
            failures[cell.name] = str(error)
            print(f"{where}: FAILED: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{where}: {headline(found)}", flush=True)
            print(f"{where}: {time.monotonic() - began:.0f} s in all", flush=True)
    return failures


def results_in(output: Path, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The JSON of the cells that are done: of these names in their order, or of all there are."""
    kept = ("gain.json", "calibration.json")
    if names is None:
        names = sorted(path.stem for path in output.glob("*.json") if path.name not in kept)
    paths = [output / f"{name}.json" for name in names]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def summarise(
    options: argparse.Namespace,
    results: list[dict[str, Any]],
    failures: Mapping[str, str] | None = None,
) -> None:
    """Print the tables, write gain.json, draw."""
    figures: list[Figures] = [figures_of(result) for result in results]
    calibrations = calibrate_all(results, options.output)
    found = goals(figures, document(calibrations) if calibrations else None)
    show(figures, found, options.markdown)
    if not options.report:
        verdicts = [vars(goal) for goal in found]
        result = {"command": sys.argv, "goals": verdicts, "failures": failures, "cells": results}
        write_json(options.output / "gain.json", result)
    if options.plots:
        for image in plot_networks(figures, options.plots):
            print(image, file=sys.stderr)


def main() -> None:
    options = arguments()
    # So that a testbed cleans up after itself when it is told to end, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if options.report:
        summarise(options, results_in(options.output))
        return
    try:
        cells, effort = chosen_cells(options)
    except ValueError as error:
        sys.exit(f"gain.py: {error}")
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        failures = run_all(cells, effort, options.output, options.resume)
    except KeyboardInterrupt:
        sys.exit("interrupted; --resume goes on with the cell that was not done")
    results = results_in(options.output, [cell.name for cell in cells])
    if results:
        summarise(options, results, failures)
    if failures:
        print(
            f"{len(failures)} of {len(cells)} cells failed: {', '.join(failures)}", file=sys.stderr
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
