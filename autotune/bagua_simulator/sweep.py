"""Step times over the bucket size, the best configuration, and both drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bagua_simulator.simulator import Simulator
from bagua_wire.configuration import Configuration
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.knobs import BUCKET_SIZES, CHANNELS_VALUES, EDGE_BUCKET_BYTES
from bagua_wire.words import describe, describe_knob

# So many of the best configurations are tried with a first or last bucket size, too.
REFINED = 10
# The smallest and the largest size that a tuning tries are powers of two.
_HALVES = range(
    2 * (BUCKET_SIZES.low_bytes.bit_length() - 1), 2 * BUCKET_SIZES.high_bytes.bit_length() - 1
)
SIZES = [round(2 ** (half / 2) / 1024) * 1024 for half in _HALVES]
"""Half-powers of two, in whole KiB."""


@dataclass(frozen=True)
class Point:
    """A configuration and its step time."""

    configuration: Configuration
    step_seconds: float


@dataclass(frozen=True)
class Sweep:
    """The simulated step times of one job.

    Attributes:
        lines: for each way of reducing the points over the bucket size, on one channel.
        default: the job's own; else torch's.
        best: over all knobs; see :func:`find_best`.
    """

    simulator: Simulator
    lines: dict[str, list[Point]]
    default: Point
    best: Point

    @property
    def speedup(self) -> float:
        """The speed-up of the best over the default."""
        return self.default.step_seconds / self.best.step_seconds

    @property
    def title(self) -> str:
        """A title such as ``vgg16 on 16 x 8 ranks, 25 Gbit/s, 100 us``."""
        cluster = self.simulator.cluster
        ranks = f"{cluster.nodes} x {cluster.ranks_per_node} ranks"
        return ", ".join(filter(None, (f"{self.simulator.workload.name} on {ranks}", cluster.link)))


def sweep(simulator: Simulator) -> Sweep:
    """Simulate half-powers of two of the bucket size, and find the best configuration."""
    lines = {
        hierarchical: [
            _point(simulator, bucket_bytes=size, hierarchical=hierarchical) for size in SIZES
        ]
        for hierarchical in simulator.ways
    }
    default = _point(simulator, **simulator.baseline)
    return Sweep(simulator, lines, default, find_best(simulator))


def find_best(simulator: Simulator) -> Point:
    """The fastest configuration.

    All combinations of size, way of reducing and channels are tried, and the fastest of them with
    every size of the first and last bucket. Explicit bucket lists are not tried.
    """
    defaults = [_point(simulator), _point(simulator, **simulator.baseline)]
    coarse = [
        _point(simulator, bucket_bytes=size, hierarchical=hierarchical, channels=channels)
        for size, hierarchical, channels in product(SIZES, simulator.ways, CHANNELS_VALUES)
    ]
    coarse = sorted([*defaults, *coarse], key=lambda point: point.step_seconds)[:REFINED]
    fine = [
        _point(simulator, **{**point.configuration, "first_bucket_bytes": first,
                             "last_bucket_bytes": last})
        for point in coarse
        for first, last in product(EDGE_BUCKET_BYTES, repeat=2)
    ]  # fmt: skip
    return min([*coarse, *fine], key=lambda point: point.step_seconds)


def _point(simulator: Simulator, **knobs: int | str | tuple[int, ...]) -> Point:
    configuration = Configuration(simulator.default, **knobs)
    return Point(configuration, simulator.step_seconds(configuration))


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
