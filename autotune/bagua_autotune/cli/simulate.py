"""``bagua-autotune simulate``: step times on a network that need not exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bagua_autotune.cli.output import print_table, say, times
from bagua_autotune.model.text import describe, describe_bytes, describe_knob
from bagua_simulator import Cluster, Simulator
from bagua_simulator.fitting import fit_record
from bagua_simulator.plot import PlotError, plot
from bagua_simulator.recorded import Record, RecordError, load_record
from bagua_simulator.sweep import Point, Sweep, sweep
from bagua_simulator.units import (
    describe_bandwidth,
    describe_duration,
    parse_bandwidth,
    parse_duration,
)
from bagua_simulator.workloads import CATALOG, load

Callback = Callable[[click.Context, click.Parameter, str | None], float | None]


def _read_by(parse: Callable[[str], float]) -> Callback:
    """Return a callback for an option that is a number with a unit."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return read


@click.command()
@click.option(
    "--model", required=True, metavar="NAME|FILE",
    help=f"{', '.join(CATALOG)}, or a file that 'export JOB --profile' wrote.",
)  # fmt: skip
@click.option("--nodes", type=click.IntRange(1, 100_000), help="Number of machines.")
@click.option("--ranks-per-node", type=click.IntRange(1, 1024), help="Devices of each machine.")
@click.option(
    "--bandwidth", metavar="25Gbit", callback=_read_by(parse_bandwidth),
    help="Bandwidth of each machine's link, in each direction.",
)  # fmt: skip
@click.option(
    "--latency", metavar="100us", callback=_read_by(parse_duration),
    help="Latency of a message between two machines.",
)  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), metavar="FILE.png|.svg",
              help="Draw the step times over the bucket size.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write everything as JSON.")
def simulate(
    model: str,
    nodes: int | None,
    ranks_per_node: int | None,
    bandwidth: float | None,
    latency: float | None,
    plot_path: Path | None,
    as_json: bool,
) -> None:
    """Simulate steps on a cluster: step time by bucket size and way of reducing.

    With a FILE the numbers of machines and ranks and the measured network are those of the job,
    unless options say otherwise.
    """
    try:
        if model in CATALOG:
            cluster = _cluster(nodes, ranks_per_node, bandwidth, latency)
            simulator = Simulator(load(model), cluster)
        else:
            record = load_record(_file(model))
            simulator = record.simulator(
                _changed(_measured(record, bandwidth, latency), nodes, ranks_per_node, bandwidth,
                         latency)
            )  # fmt: skip
    except (RecordError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    found = sweep(simulator)
    if plot_path:
        try:
            plot(plot_path, found)
        except PlotError as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_document(found), indent=2))
    else:
        _print(found)


def _file(model: str) -> Path:
    path = Path(model)
    if not path.exists():
        raise RecordError(
            f"there is no file {model!r}, nor is it one of the models {', '.join(CATALOG)}"
        )
    return path


def _cluster(
    nodes: int | None, ranks_per_node: int | None, bandwidth: float | None, latency: float | None
) -> Cluster:
    """The cluster that the options name."""
    if nodes is None or ranks_per_node is None or bandwidth is None or latency is None:
        raise click.UsageError(
            f"{', '.join(CATALOG)} need --nodes, --ranks-per-node, --bandwidth and --latency"
        )
    return Cluster(nodes, ranks_per_node, bandwidth, latency)


def _measured(record: Record, bandwidth: float | None, latency: float | None) -> Cluster:
    """The cluster that the job ran on; if nothing was measured, a usual one with this network."""
    try:
        return fit_record(record).cluster
    except ValueError as error:
        if bandwidth is None or latency is None:
            raise click.UsageError(f"{error}; give --bandwidth and --latency") from error
        return Cluster(*record.shape, bandwidth, latency)


def _changed(
    measured: Cluster,
    nodes: int | None,
    ranks_per_node: int | None,
    bandwidth: float | None,
    latency: float | None,
) -> Cluster:
    """The job's cluster with what the options change."""
    if measured.nodes == 1 and (nodes or 1) > 1 and (bandwidth is None or latency is None):
        raise click.UsageError("the job ran on one node; more need --bandwidth and --latency")
    return replace(
        measured,
        nodes=nodes or measured.nodes,
        ranks_per_node=ranks_per_node or measured.ranks_per_node,
        bandwidth_bytes_per_second=bandwidth or measured.bandwidth_bytes_per_second,
        latency_seconds=latency or measured.latency_seconds,
    )


def _print(found: Sweep) -> None:
    say(found.title)
    columns = ["bucket", *(f"{describe_knob('hierarchical', name)} ms" for name in found.lines)]
    rows = [
        [describe_bytes(points[0].configuration.number("bucket_bytes")), *map(_ms, points)]
        for points in zip(*found.lines.values(), strict=True)
    ]
    print_table(columns, rows)
    for line in _assumed(found.simulator):
        say(line)
    say(f"computing alone: {found.simulator.workload.compute_seconds * 1e3:.4g} ms")
    say(f"default: {describe(found.default.configuration)}: {_ms(found.default)} ms")
    best = f"{describe(found.best.configuration)}: {_ms(found.best)} ms"
    say(f"best: {best}, {times(found.speedup)} over the default")


def _assumed(simulator: Simulator) -> list[str]:
    """What was assumed beside the network between the machines."""
    cluster = simulator.cluster
    inside = describe_bandwidth(cluster.inside_bandwidth_bytes_per_second)
    start, launch = map(describe_duration, (cluster.start_seconds, simulator.launch_seconds))
    return [
        f"inside a node: {inside}, {describe_duration(cluster.inside_latency_seconds)}; "
        f"sharded reductions reach {cluster.shards_share:.0%} of it",
        f"an operation: {start} to start, {launch} to launch; "
        f"computing takes {simulator.contention:.0%} longer beside one",
    ]


def _document(found: Sweep) -> dict[str, Any]:
    cluster = found.simulator.cluster
    return {
        "model": found.simulator.workload.name,
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "bandwidth_bytes_per_second": cluster.bandwidth_bytes_per_second,
        "latency_seconds": cluster.latency_seconds,
        "inside_bandwidth_bytes_per_second": cluster.inside_bandwidth_bytes_per_second,
        "inside_latency_seconds": cluster.inside_latency_seconds,
        "shards_share": cluster.shards_share,
        "start_seconds": cluster.start_seconds,
        "launch_seconds": found.simulator.launch_seconds,
        "contention": found.simulator.contention,
        "compute_seconds": found.simulator.workload.compute_seconds,
        "default": _entry(found.default),
        "best": _entry(found.best),
        "speedup": found.speedup,
        "sweep": [_entry(point) for points in found.lines.values() for point in points],
    }


def _entry(point: Point) -> dict[str, Any]:
    return {"configuration": dict(point.configuration), "step_seconds": point.step_seconds}


def _ms(point: Point) -> str:
    return f"{point.step_seconds * 1e3:.4g}"
