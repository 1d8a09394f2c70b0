"""The gain over stock DDP and Bagua's default: real jobs on hosts of one machine."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.cells.cell import (
    DEFAULT_COMPUTE_SECONDS,
    DEFAULT_GRADIENT_BYTES,
    DEFAULT_MODELS,
    DEFAULT_NETWORKS,
    FULL,
    MODELS,
    ON_GPUS,
    SMOKE,
    Cell,
    Effort,
    grid,
)
from benchmarks.support.cells.figures import Figures, figures_of, goals, judged
from benchmarks.support.cells.report import headline, show
from benchmarks.support.cells.run import CellError, run_cell
from benchmarks.support.harness import forget_own_variables, write_json

SMOKE_FIELDS: dict[str, Any] = {"smoke": True, "gradient_bytes": 4_000_000, "compute_seconds": 0.1}
SMOKE_NETWORK = "1gbit"
EFFORT = ("sweep_rounds", "sweep_steps", "run_off_rounds")
SWEPT = ("sweep_mib", "sweep_channels")
"""Options that are fields of Effort, or make some; None: as usual."""
OF_SMOKE = ("gradient_megabytes", "compute_seconds", "repeat", *EFFORT, *SWEPT)
"""Options that --smoke decides."""
SHORT = {"gpt2": "gpt2-small"}
"""Other names of models."""
SUMMARY = "gain.json"
"""Beside the cells of a folder."""
Measured = tuple[dict[str, Any], Figures]
"""The JSON of a cell, and what it showed."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    _add_choice_of_cells(parser)
    _add_what_to_do(parser)
    options = parser.parse_args(argv)
    if options.smoke:
        _one_small_cell(parser, options)
    options.models = [SHORT.get(name, name) for name in options.models or DEFAULT_MODELS]
    options.networks = options.networks or list(DEFAULT_NETWORKS)
    return options


def _add_choice_of_cells(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help=f"some of {', '.join(MODELS)}, the last two on GPUs alone "
        f"(default: {', '.join(DEFAULT_MODELS)})",
    )
    parser.add_argument(
        "--networks",
        nargs="+",
        metavar="NETWORK",
        help="such as 300mbit, 1gbit, 1gbit-2ms (round trip), unshaped "
        f"(default: {', '.join(DEFAULT_NETWORKS)})",
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--gradient-megabytes", type=float, default=DEFAULT_GRADIENT_BYTES / 1e6)
    parser.add_argument("--compute-seconds", type=float, default=DEFAULT_COMPUTE_SECONDS,
                        help="how long each step sleeps in place of computing")  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"),
                        help="cuda: each rank has its own GPU, full-size models compute, and "
                        "hosts are connected by TCP")  # fmt: skip
    parser.add_argument("--allow", default="", choices=("bfloat16", "float16"),
                        help="tune a second time, allowing this precision on the wire")  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1, help="runs of each cell")
    for what, of in (("mib", "bucket sizes"), ("channels", "numbers of channels")):
        parser.add_argument(f"--sweep-{what}", type=int, nargs="+", metavar="N",
                            help=f"{of} in the sweep")  # fmt: skip
    for what in ("sweep-rounds", "sweep-steps", "run-off-rounds"):
        usual = [getattr(effort, what.replace("-", "_")) for effort in (FULL, ON_GPUS)]
        parser.add_argument(f"--{what}", type=int, metavar="N",
                            help=f"default: {usual[0]}, on GPUs {usual[1]}")  # fmt: skip


def _add_what_to_do(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("build/gain"), metavar="FOLDER")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="skip cells that were measured before with the same options",
    )
    parser.add_argument(
        "--loopback",
        action="store_true",
        help="run over loopback if hosts cannot be emulated; such cells do not count for the goals",
    )
    parser.add_argument("--smoke", action="store_true",
                        help="run one small cell for a minute; no figure counts")  # fmt: skip
    parser.add_argument("--report", action="store_true",
                        help="run nothing: print the figures of all cells in FOLDER")  # fmt: skip
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")


def _one_small_cell(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.models = options.models or list(DEFAULT_MODELS[:1])
    options.networks = options.networks or [SMOKE_NETWORK]
    if len(options.models) > 1 or len(options.networks) > 1:
        parser.error("--smoke runs one cell: one model on one network")
    for name in OF_SMOKE:
        if getattr(options, name) != parser.get_default(name):
            parser.error(f"--smoke has a --{name.replace('_', '-')} of its own")


def chosen_cells(options: argparse.Namespace) -> tuple[list[Cell], Effort]:
    """Raises ValueError for a model or a network that there is not, or a sweep without what all
    else is compared with."""
    fields: dict[str, Any] = {
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "device": options.device,
    }
    if options.smoke:
        cells = grid(options.models, options.networks, **fields, **SMOKE_FIELDS)
        return cells, replace(SMOKE, allow=options.allow)
    fields["gradient_bytes"] = round(1e6 * options.gradient_megabytes)
    fields["compute_seconds"] = options.compute_seconds
    given = {name: getattr(options, name) for name in EFFORT if getattr(options, name) is not None}
    if 10 not in (options.sweep_mib or [10]) or 1 not in (options.sweep_channels or [1]):
        raise ValueError("all else is compared with 10 MiB and 1 channel: the sweep must have both")
    if options.sweep_mib:
        given["sizes_bytes"] = tuple(mib * 1024 * 1024 for mib in options.sweep_mib)
    if options.sweep_channels:
        given["channels"] = tuple(options.sweep_channels)
    effort = ON_GPUS if options.device == "cuda" else FULL
    effort = replace(effort, allow=options.allow, **given)
    return grid(options.models, options.networks, options.repeat, **fields), effort


def run_all(
    cells: Sequence[Cell], effort: Effort, output: Path, resume: bool, loopback: bool = False
) -> dict[str, str]:
    """One after the other; a cell that fails is reported and the others go on. The failures.

    Args:
        resume: cells that are done stay as they are.
    """
    failures: dict[str, str] = {}
    for number, cell in enumerate(cells, 1):
        where = f"[{number}/{len(cells)}] {cell.name}"
        if resume and is_done(cell, effort, output, loopback):
            print(f"{where}: done before", flush=True)
            continue
        print(f"{where}: begins {time.strftime('%H:%M:%S')}", flush=True)
        began = time.monotonic()
        try:
            path = run_cell(cell, effort, output, loopback)
            found = figures_of(json.loads(path.read_text()))
        except Exception as error:  # whatever it is, the other cells take hours
            if not isinstance(error, CellError):
                traceback.print_exc()
            failures[cell.name] = str(error)
            print(f"{where}: FAILED: {error}", file=sys.stderr, flush=True)
        else:
            print(f"{where}: {headline(found)}", flush=True)
            print(f"{where}: {time.monotonic() - began:.0f} s in all", flush=True)
    return failures


def is_done(cell: Cell, effort: Effort, output: Path, loopback: bool = False) -> bool:
    """Whether the folder holds the cell as it is asked for now. The effort counts as far as it is
    known; what ran over loopback counts where that is allowed."""
    try:
        result = json.loads((output / f"{cell.name}.json").read_text())
        is_as_asked = result["cell"] == cell.to_json()
        is_as_asked &= result.get("effort", effort.to_json()) == effort.to_json()
        return is_as_asked and (loopback or result["fallback"] is None)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def measured_in(output: Path, names: Sequence[str] | None = None) -> list[Measured]:
    """The cells that are done: of these names, or all there are, by network and model in the order
    of the defaults. What cannot be read is named and left out."""
    if names is None:
        names = [path.stem for path in output.glob("*.json") if path.name != SUMMARY]
    found = []
    for path in (output / f"{name}.json" for name in names):
        try:
            result = json.loads(path.read_text())
            found.append((result, figures_of(result)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path}: left out: {error!r}", file=sys.stderr, flush=True)
    return sorted(found, key=lambda pair: _place(pair[1].cell))


def _place(cell: Cell) -> tuple[int, str, int, str]:
    network, model = (
        known.index(word) if word in known else len(known)
        for known, word in ((DEFAULT_NETWORKS, cell.network), (MODELS, cell.model))
    )
    return network, cell.network, model, cell.name


def summarise(
    options: argparse.Namespace,
    measured: Sequence[Measured],
    failures: Mapping[str, str] | None = None,
) -> None:
    """Write gain.json, print the tables; of at least one cell."""
    results, figures = [result for result, _ in measured], [found for _, found in measured]
    found = goals(judged(figures)[0])
    if not options.report:
        verdicts = [vars(goal) for goal in found]
        result = {"command": sys.argv, "goals": verdicts, "failures": failures, "cells": results}
        write_json(options.output / SUMMARY, result)
    show(figures, found, options.markdown)


def main() -> None:
    options = arguments()
    forget_own_variables()
    if options.report:
        measured = measured_in(options.output)
        if not measured:
            sys.exit(f"gain.py: {options.output} holds no cell that is done")
        summarise(options, measured)
        return
    try:
        cells, effort = chosen_cells(options)
    except ValueError as error:
        sys.exit(f"gain.py: {error}")
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        failures = run_all(cells, effort, options.output, options.resume, options.loopback)
    except KeyboardInterrupt:
        sys.exit("interrupted; --resume goes on with the cell that was not done")
    done = [cell.name for cell in cells if cell.name not in failures]
    measured = measured_in(options.output, done)
    if measured:
        summarise(options, measured, failures)
    if failures:
        print(
            f"{len(failures)} of {len(cells)} cells failed: {', '.join(failures)}", file=sys.stderr
        )
        sys.exit(1)


if __name__ == "__main__":
    # So that a testbed cleans up after itself when it is told to end, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()
