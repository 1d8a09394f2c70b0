"""Step time over bucket size: one image for each network, one panel for each cell."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arms import COMPUTE, KIB, MIB, STOCK_DEFAULT, TUNED, WAYS, size_in_words
from .figures import Figures
from .selection import STOCK_DEFAULT_BYTES
from .spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAY_STYLES = {"flat": ("C0", "o"), "leaders": ("C1", "s"), "shards": ("C2", "^")}
WAY_LABELS = {
    "flat": "ours, flat: all ranks at once",
    "leaders": "ours, by a leader of each node",
    "shards": "ours, by shards inside each node",
}
CHANNELS = {2: ("C4", "v"), 4: ("C5", "D"), 8: ("C6", "P")}
"""Of the lines of several channels, all of them flat."""
LABELS = (
    "stock DDP at its default",
    "that default, scaled like the model",
    "stock DDP at other sizes",
    *WAY_LABELS.values(),
    *(f"ours, flat, {channels} channels" for channels in CHANNELS),
    "where the live tuning left the job",
    "computing alone: no exchange at all",
)
"""In the order of the legend."""
UNITS = {"KiB": KIB, "MiB": MIB}


def plot_networks(cells: Sequence[Figures], folder: Path) -> dict[str, Path]:
    """Draw the first run of each cell; return the image of each network.

    Raises:
        ImportError: matplotlib is missing (pip install 'bagua-autotune[plot]').
    """
    folder.mkdir(parents=True, exist_ok=True)
    networks: dict[str, list[Figures]] = {}
    for cell in cells:
        if cell.cell.run == 1:
            networks.setdefault(cell.cell.network, []).append(cell)
    images = {}
    for network, found in networks.items():
        on_gpus = "gpus-" if found[0].cell.device == "cuda" else ""
        images[network] = folder / f"gain-{on_gpus}{network}.png"
        draw(network, found).savefig(images[network], dpi=120)
    return images


def draw(network: str, cells: Sequence[Figures]) -> Figure:
    """One panel for each cell, on a vertical axis of its own that begins at 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.6 * len(cells), 7.4), 6.0), layout="constrained")
    figure.suptitle(f"Network {network}: which buckets are fastest, and does the tuner find them?")
    panels = figure.subplots(1, len(cells), squeeze=False)[0]
    entries: dict[str, Any] = {}
    for axes, cell in zip(panels, cells, strict=True):
        _draw_panel(axes, cell)
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    panels[0].set_ylabel("ms per step (less is better)")
    columns = 2 if len(cells) < 3 else 3
    labels = [label for label in LABELS if label in entries]
    handles = [entries[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _draw_panel(axes: Axes, cell: Figures) -> None:
    axes.set_title(_answer(cell), fontsize="medium")
    axes.set_xlabel("bucket size (bars: range of the rounds)")
    for way in WAYS.values():
        points = _points(cell, f"{way} ")
        colour, marker = WAY_STYLES[way]
        if points:
            _line(axes, points, color=colour, marker=marker, label=WAY_LABELS[way])
    for channels, (colour, marker) in CHANNELS.items():
        words = f", {channels} channels"
        if points := _points(cell, "flat ", words):
            label = f"ours, flat{words}"
            _line(axes, points, color=colour, marker=marker, label=label)
    stock = _points(cell, "stock ")
    default = {STOCK_DEFAULT_BYTES: cell.sweep[STOCK_DEFAULT]}
    black = {"color": "black", "linestyle": "none"}
    _line(axes, default, marker="*", label=LABELS[0], **{**black, "markersize": 13})
    _scaled_default(axes, cell)
    _line(axes, stock, marker="x", label=LABELS[2], **black)
    for name, colour, line, label in (
        (TUNED, "C3", "--", LABELS[-2]),
        (COMPUTE, "grey", ":", LABELS[-1]),
    ):
        milliseconds = 1e3 * cell.sweep[name].seconds
        axes.axhline(milliseconds, color=colour, linestyle=line, linewidth=1.8, label=label)
    axes.set_xscale("log", base=2)
    sizes = sorted({*_points(cell, "flat "), *stock, *default})
    axes.set_xticks(sizes, [size_in_words(size) for size in sizes], rotation=60)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _answer(cell: Figures) -> str:
    """The cell, its step times, and how many times as fast the tuned one is."""
    shape = f"{cell.cell.model}, {cell.cell.nodes} x {cell.cell.ranks_per_node} ranks"
    best = cell.over_best_stock
    measured = cell.run_off if best.stage == "run-off" else cell.sweep
    stock, tuned = (cell.run_off[name].seconds for name in (STOCK_DEFAULT, TUNED))
    times = f"{cell.over_stock.found.paired_ratio:.2f} and {best.found.paired_ratio:.2f} times"
    return "\n".join(
        [
            shape + (", loopback" if cell.fallback else ""),
            f"stock DDP {1e3 * stock:.0f} ms, at its best size "
            f"{1e3 * measured[best.over].seconds:.0f} ms",
            f"tuned {1e3 * tuned:.0f} ms: {times} as fast",
        ]
    )


def _scaled_default(axes: Axes, cell: Figures) -> None:
    """A ring around stock DDP where its default would be on a model as small as this one."""
    name = cell.over_scaled_stock.over
    size = STOCK_DEFAULT_BYTES if name == STOCK_DEFAULT else _bytes(name.removeprefix("stock "))
    axes.plot(
        [size],
        [1e3 * cell.sweep[name].seconds],
        color="black",
        linestyle="none",
        marker="o",
        markersize=14,
        markerfacecolor="none",
        label=LABELS[1],
    )


def _points(cell: Figures, prefix: str, suffix: str = "") -> dict[int, Spread]:
    """The arms of this name by their size in bytes."""
    form = re.compile(re.escape(prefix) + r"(\d+ [KM]iB)" + re.escape(suffix))
    found = {form.fullmatch(name): spread for name, spread in cell.sweep.items()}
    return {_bytes(match[1]): spread for match, spread in found.items() if match}


def _line(axes: Axes, points: dict[int, Spread], **style: Any) -> None:
    sizes = sorted(points)
    found = [points[size] for size in sizes]
    middles = [1e3 * spread.seconds for spread in found]
    errors = [
        [1e3 * (spread.seconds - spread.low) for spread in found],
        [1e3 * (spread.high - spread.seconds) for spread in found],
    ]
    style = {"capsize": 3, "markersize": 5, "linewidth": 1.4, **style}
    axes.errorbar(sizes, middles, yerr=errors, **style)


def _bytes(words: str) -> int:
    number, unit = words.split()
    return int(number) * UNITS[unit]
