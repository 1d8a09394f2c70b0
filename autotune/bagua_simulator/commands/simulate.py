"""``bagua-autotune simulate``: step times on a network that need not exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import isinf
from pathlib import Path
from typing import Any, NamedTuple, cast

import click

from bagua_autotune.cli.output import print_table, say, times
from bagua_simulator import Cluster, Simulator
from bagua_simulator.algorithms import compare
from bagua_simulator.cluster import (
    describe_bandwidth,
    describe_duration,
    parse_bandwidth,
    parse_duration,
)
from bagua_simulator.commands.compared import show_comparison
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import Record, RecordError, load_record
from bagua_simulator.recomputation import (
    LARGEST_SHARE,
    Block,
    RecomputingSimulator,
    Room,
    replicated,
)
from bagua_simulator.sweep import PlotError, Point, Sweep, plot, sweep
from bagua_simulator.workloads import CATALOG, load
from bagua_wire.knob_kinds import describe_bytes, size_of
from bagua_wire.knobs import RECOMPUTED_KNOB
from bagua_wire.words import describe, describe_knob

Callback = Callable[[click.Context, click.Parameter, str | None], Any]


class Asked(NamedTuple):
    """One cluster as the options name it; None: the job's own."""

    nodes: int | None
    ranks_per_node: int | None
    bandwidth: float | None
    latency: float | None


def every(
    nodes: Sequence[int] | None,
    ranks_per_node: Sequence[int] | None,
    bandwidth: Sequence[float] | None,
    latency: Sequence[float] | None,
) -> list[Asked]:
    """Every combination of the values of the options; None: the option was not given."""
    shapes = product(nodes or (None,), ranks_per_node or (None,))
    networks = [*product(bandwidth or (None,), latency or (None,))]
    return [Asked(*shape, *network) for shape in shapes for network in networks]


def parsed(parse: Callable[[str], Any], are_several: bool = True) -> Callback:
    """A callback for an option that is a number with a unit, or several with commas between."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        try:
            return [parse(each) for each in text.split(",")] if are_several else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return read


def counts(most: int) -> Callback:
    """A callback for an option that is a whole number from 1 on, or several of them."""
    kind: Any = click.IntRange(1, most)
    return parsed(lambda text: kind.convert(text, None, None))


def simulators_of(model: str, asked: Sequence[Asked]) -> list[Simulator]:
    """The model on each cluster; a cluster of one node only once, whatever the network.

    Args:
        model: of the catalog, or a file.

    Raises:
        RecordError: the file cannot be used.
        ValueError: a cluster cannot be.
    """
    if model in CATALOG:
        clusters = [_cluster(each) for each in asked]
        return [Simulator(load(model), cluster) for cluster in _different(clusters)]
    record = load_record(_file(model))
    measured = _measured(record, asked[0])
    clusters = [_changed(measured, each) for each in asked]
    return [record.simulator(cluster) for cluster in _different(clusters)]


def _different(clusters: Sequence[Cluster]) -> list[Cluster]:
    """The clusters without those that another network does not change: of one node."""
    found: dict[Any, Cluster] = {}
    for cluster in clusters:
        found.setdefault(cluster.ranks_per_node if cluster.nodes == 1 else cluster, cluster)
    return list(found.values())


def _file(model: str) -> Path:
    path = Path(model)
    if not path.exists():
        raise RecordError(
            f"there is no file {model!r}, nor is it one of the models {', '.join(CATALOG)}"
        )
    return path


def _cluster(asked: Asked) -> Cluster:
    """The cluster that the options name."""
    if None in asked:
        raise click.UsageError(
            f"{', '.join(CATALOG)} need --nodes, --ranks-per-node, --bandwidth and --latency"
        )
    return Cluster(*cast(tuple[int, int, float, float], asked), is_nccl=True)


def _measured(record: Record, asked: Asked) -> Cluster:
    """The cluster that the job ran on; if nothing was measured, a usual one with this network."""
    try:
        return fit_record(record).cluster
    except ValueError as error:
        if asked.bandwidth is None or asked.latency is None:
            raise click.UsageError(f"{error}; give --bandwidth and --latency") from error
        return Cluster(*record.shape, asked.bandwidth, asked.latency, is_nccl=record.is_nccl)


def _changed(measured: Cluster, asked: Asked) -> Cluster:
    """The job's cluster with what the options change."""
    if measured.nodes == 1 and (asked.nodes or 1) > 1 and None in asked[2:]:
        raise click.UsageError("the job ran on one node; more need --bandwidth and --latency")
    return replace(
        measured,
        nodes=asked.nodes or measured.nodes,
        ranks_per_node=asked.ranks_per_node or measured.ranks_per_node,
        bandwidth_bytes_per_second=asked.bandwidth or measured.bandwidth_bytes_per_second,
        latency_seconds=asked.latency or measured.latency_seconds,
        # A link that was named is one, and not what the cores copy.
        together=measured.together if asked.bandwidth is None else 1.0,
    )


@click.command()
@click.option(
    "--model", required=True, metavar="NAME|FILE",
    help=f"{', '.join(CATALOG)}, or a file that 'export JOB --profile' wrote.",
)  # fmt: skip
@click.option("--nodes", metavar="N", callback=counts(100_000), help="Number of machines.")
@click.option(
    "--ranks-per-node", metavar="N", callback=counts(1024), help="Devices of each machine."
)
@click.option(
    "--bandwidth", metavar="25Gbit", callback=parsed(parse_bandwidth),
    help="Bandwidth of each machine's link, in each direction.",
)  # fmt: skip
@click.option(
    "--latency", metavar="100us", callback=parsed(parse_duration),
    help="Latency of a message between two machines.",
)  # fmt: skip
@click.option("--algorithms", "compares", is_flag=True,
              help="Compare DDP, every algorithm and sharded models, each at its best setting; "
              "also done where one of the four options above has several values.")  # fmt: skip
@click.option("--recomputed", "blocks", type=click.IntRange(1, 1000), metavar="N",
              help="The model has so many blocks, which recompute their activations: step times by "
              "how many of them do. Each takes its part of the forward pass.")  # fmt: skip
@click.option("--block-memory", callback=parsed(size_of, are_several=False), default="0B",
              metavar="1.5GiB", help="What a block keeps if it is not recomputed.")  # fmt: skip
@click.option("--free-memory", callback=parsed(size_of, are_several=False), metavar="40GiB",
              help="What may be used beside the peak with all blocks recomputed.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), metavar="FILE.png|.svg",
              help="Draw the step times over the bucket size.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write everything as JSON.")
def simulate(
    model: str,
    nodes: list[int] | None,
    ranks_per_node: list[int] | None,
    bandwidth: list[float] | None,
    latency: list[float] | None,
    compares: bool,
    blocks: int | None,
    block_memory: int,
    free_memory: int | None,
    plot_path: Path | None,
    as_json: bool,
) -> None:
    """Simulate steps on a cluster: step time by bucket size and way of reducing, or by algorithm.

    With a FILE the numbers of machines and ranks and the measured network are those of the job,
    unless options say otherwise. Several values, with commas between, make a table.
    """
    asked = every(nodes, ranks_per_node, bandwidth, latency)
    compares = compares or len(asked) > 1
    if (compares or blocks) and plot_path:
        raise click.UsageError("--plot draws one network and no algorithms")
    if compares and blocks:
        raise click.UsageError("--recomputed is for one network and no algorithms")
    try:
        simulators = simulators_of(model, asked)
        found = None if compares or blocks else sweep(simulators[0])
    except (RecordError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if blocks:
        show_recomputed(simulators[0], blocks, block_memory, free_memory, as_json)
        return
    if found is None:
        show_comparison([compare(each) for each in simulators], simulators[0], as_json)
        return
    if plot_path:
        try:
            plot(plot_path, found)
        except PlotError as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_document(found), indent=2))
    else:
        _print(found, is_measured=model not in CATALOG)


def _print(found: Sweep, is_measured: bool) -> None:
    say(found.title)
    columns = ["bucket", *(f"{describe_knob('hierarchical', name)} ms" for name in found.lines)]
    rows = [
        [describe_bytes(points[0].configuration.number("bucket_bytes")), *map(_ms, points)]
        for points in zip(*found.lines.values(), strict=True)
    ]
    print_table(columns, rows)
    if is_measured and found.simulator.cluster.nodes > 1:
        say(_connection(found.simulator.cluster))
    for line in _assumed(found.simulator):
        say(line)
    say(f"computing alone: {found.simulator.workload.compute_seconds * 1e3:.4g} ms")
    say(f"default: {describe(found.default.configuration)}: {_ms(found.default)} ms")
    best = f"{describe(found.best.configuration)}: {_ms(found.best)} ms"
    say(f"best: {best}, {times(found.speedup)} over the default")


def _connection(cluster: Cluster) -> str:
    """What a measured job tells of one connection, and of several together."""
    if isinf(cluster.flow_bytes_per_second):
        return (
            "one channel is taken to fill the link between nodes: no way of reducing was measured "
            "with several numbers of channels"
        )
    alone = describe_bandwidth(cluster.flow_bytes_per_second)
    said = f"one channel: {alone} between nodes"
    if cluster.together == 1:
        return said
    return f"{said}; the figure above is what several reach, which may be less than the link"


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
        "channel_bytes_per_second": None
        if isinf(cluster.flow_bytes_per_second)
        else cluster.flow_bytes_per_second,
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


def show_recomputed(
    simulator: Simulator, blocks: int, block_bytes: int, free_bytes: int | None, as_json: bool
) -> None:
    """Print them, and the fewest that there is room for.

    Args:
        blocks: in which the model's forward pass is, alike; by default all are recomputed.
        block_bytes: what each keeps if it is not.
        free_bytes: at the default's peak, of what may be used; None: enough.
    """
    workload = simulator.workload
    each = Block(workload.forward_seconds / blocks, block_bytes)
    enough = blocks * block_bytes if free_bytes is None else free_bytes
    room = Room(0.0, (enough + 1) / LARGEST_SHARE)
    recomputing = RecomputingSimulator(
        replicated(workload, simulator.cluster), [each] * blocks, room
    )
    rows = []
    for count in recomputing.space[RECOMPUTED_KNOB]["values"]:
        configuration = {**recomputing.default, RECOMPUTED_KNOB: count}
        seconds = recomputing.step_seconds(configuration)
        rows.append((count, seconds, recomputing.peak_bytes(configuration)))
    default_seconds = rows[0][1]
    count, seconds, more_bytes = rows[-1]
    if as_json:
        names = "recomputed", "seconds", "more_bytes"
        named = [dict(zip(names, row, strict=True)) for row in rows]
        click.echo(json.dumps({"model": workload.name, "blocks": blocks, "rows": named}, indent=2))
        return
    say(f"{workload.name}: {blocks} blocks, of which each keeps {describe_bytes(block_bytes)}")
    print_table(
        ["recomputed", "ms", "more memory"],
        [[str(n), f"{s * 1e3:.4g}", describe_bytes(more)] for n, s, more in rows],
    )
    bought = ""
    if more_bytes:
        saved_ms = 1e3 * (default_seconds - seconds) / (more_bytes / 2**30)
        bought = f", {saved_ms:.3g} ms for each GiB"
    say(f"best: {count} recomputed, {times(default_seconds / seconds)} over all{bought}")
