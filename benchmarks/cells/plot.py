"""Step time over bucket size: one image for each network, one panel for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arms import COMPUTE, KIB, MIB, STOCK_DEFAULT, TUNED, WAYS, size_in_words
from .figures import Figures
from .spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAY_STYLES = {"flat": ("C0", "o"), "leaders": ("C1", "s"), "shards": ("C2", "^")}
DEFAULT_MIB = 25
"""Where stock DDP's default is drawn."""
UNITS = {"KiB": KIB, "MiB": MIB}


def plot_networks(cells: Sequence[Figures], folder: Path) -> list[Path]:
    """Draw the first run of each cell; return the images.

    Raises:
        ImportError: matplotlib is missing (pip install 'bagua-autotune[plot]').
    """
    folder.mkdir(parents=True, exist_ok=True)
    networks: dict[str, list[Figures]] = {}
    for cell in cells:
        if cell.cell.run == 1:
            networks.setdefault(cell.cell.network, []).append(cell)
    images = []
    for network, found in networks.items():
        images.append(folder / f"gain-{network}.png")
        draw(network, found).savefig(images[-1], dpi=120)
    return images


def draw(network: str, cells: Sequence[Figures]) -> Figure:
    """One panel for each cell, on a vertical axis of its own that begins at 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.6 * len(cells), 6.0), 5.4), layout="constrained")
    figure.suptitle(f"Step time over bucket size, {network}")
    panels = figure.subplots(1, len(cells), squeeze=False)[0]
    entries: dict[str, Any] = {}
    for axes, cell in zip(panels, cells, strict=True):
        _draw_panel(axes, cell)
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    panels[0].set_ylabel("ms per step")
    columns = 2 if len(cells) == 1 else 3
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns)
    return figure


def _draw_panel(axes: Axes, cell: Figures) -> None:
    shape = f"{cell.cell.nodes} x {cell.cell.ranks_per_node} ranks"
    axes.set_title(f"{cell.cell.model}, {shape}" + (", loopback" if cell.fallback else ""))
    axes.set_xlabel("bucket size")
    for way in WAYS.values():
        points = _points(cell, f"{way} ")
        colour, marker = WAY_STYLES[way]
        if points:
            _line(axes, points, color=colour, marker=marker, label=f"ours, {way}")
    stock = _points(cell, "stock ") | {DEFAULT_MIB * MIB: cell.sweep[STOCK_DEFAULT]}
    _line(axes, stock, color="black", marker="x", linestyle="none", label="stock DDP (25: default)")
    for name, style, label in ((COMPUTE, ":", "computing alone"), (TUNED, "--", "tuned job")):
        colour = "grey" if name == COMPUTE else "C3"
        seconds = cell.sweep[name].seconds
        axes.axhline(1e3 * seconds, color=colour, linestyle=style, label=label)
    axes.set_xscale("log", base=2)
    sizes = sorted({*_points(cell, "flat ")} | {*stock})
    axes.set_xticks(sizes, [size_in_words(size) for size in sizes], rotation=60)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _points(cell: Figures, prefix: str) -> dict[int, Spread]:
    """The arms of this name by their size in bytes."""
    return {
        _bytes(name.removeprefix(prefix)): found
        for name, found in cell.sweep.items()
        if name.startswith(prefix) and name != STOCK_DEFAULT
    }


def _line(axes: Axes, points: dict[int, Spread], **style: Any) -> None:
    sizes = sorted(points)
    found = [points[size] for size in sizes]
    middles = [1e3 * spread.seconds for spread in found]
    errors = [
        [1e3 * (spread.seconds - spread.low) for spread in found],
        [1e3 * (spread.high - spread.seconds) for spread in found],
    ]
    axes.errorbar(sizes, middles, yerr=errors, capsize=3, markersize=5, linewidth=1.4, **style)


def _bytes(words: str) -> int:
    number, unit = words.split()
    return int(number) * UNITS[unit]
