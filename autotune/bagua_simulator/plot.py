"""Step time over bucket size, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bagua_simulator.sweep import Point, Sweep
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.words import describe, describe_knob

FORMATS = (".png", ".svg")


class PlotError(Exception):
    """The plot cannot be drawn or written; the text says why and what to do."""


def plot(path: Path, sweep: Sweep) -> None:
    """Write the plot to ``path``, in the format of its ending.

    Raises:
        PlotError: matplotlib is missing, the ending is unknown, or the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise PlotError(f"{path}: a plot's name must end in {' or '.join(FORMATS)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise PlotError("plots need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(title=sweep.title, xlabel="bucket size", ylabel="ms per step")
    for hierarchical, points in sweep.lines.items():
        axes.plot(*_coordinates(points), label=describe_knob("hierarchical", hierarchical))
    for name, marker, point in (("default", "o", sweep.default), ("best", "*", sweep.best)):
        label = f"{name}: {describe(point.configuration)}"
        axes.plot(*_coordinates([point]), "k" + marker, markersize=9, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: describe_bytes(size)))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise PlotError(f"{path} cannot be written: {error.strerror}") from error


def _coordinates(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    """Return bucket sizes in bytes, and milliseconds."""
    sizes = [point.configuration.number("bucket_bytes") for point in points]
    return sizes, [point.step_seconds * 1e3 for point in points]
