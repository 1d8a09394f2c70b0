"""The clusters that the options of ``simulate`` name, and a model on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click

from bagua_simulator import Cluster, Simulator
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import Record, RecordError, load_record
from bagua_simulator.workloads import CATALOG, load

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


def several(parse: Callable[[str], float]) -> Callback:
    """A callback for an option that is a number with a unit, or several with commas between."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else [parse(each) for each in text.split(",")]
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from error

    return read


def counts(most: int) -> Callback:
    """A callback for an option that is a whole number from 1 on, or several of them."""
    kind: Any = click.IntRange(1, most)

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return None
        return [kind.convert(each, parameter, context) for each in text.split(",")]

    return read


def simulators_of(model: str, asked: Sequence[Asked]) -> list[Simulator]:
    """The model on each cluster; a cluster of one node only once, whatever the network.

    Args:
        model: of the catalog, or a file.

    Raises:
        RecordError: the file cannot be used.
        ValueError: a cluster cannot be.
    """
    if model in CATALOG:
        clusters = [_cluster(*each) for each in asked]
        return [Simulator(load(model), cluster) for cluster in _different(clusters)]
    record = load_record(_file(model))
    measured = _measured(record, asked[0].bandwidth, asked[0].latency)
    clusters = [_changed(measured, *each) for each in asked]
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


def _cluster(
    nodes: int | None, ranks_per_node: int | None, bandwidth: float | None, latency: float | None
) -> Cluster:
    """The cluster that the options name."""
    if nodes is None or ranks_per_node is None or bandwidth is None or latency is None:
        raise click.UsageError(
            f"{', '.join(CATALOG)} need --nodes, --ranks-per-node, --bandwidth and --latency"
        )
    return Cluster(nodes, ranks_per_node, bandwidth, latency, is_nccl=True)


def _measured(record: Record, bandwidth: float | None, latency: float | None) -> Cluster:
    """The cluster that the job ran on; if nothing was measured, a usual one with this network."""
    try:
        return fit_record(record).cluster
    except ValueError as error:
        if bandwidth is None or latency is None:
            raise click.UsageError(f"{error}; give --bandwidth and --latency") from error
        return Cluster(*record.shape, bandwidth, latency, is_nccl=record.is_nccl)


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
        # A link that was named is one, and not what the cores copy.
        together=measured.together if bandwidth is None else 1.0,
    )
