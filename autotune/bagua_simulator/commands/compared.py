"""What ``simulate`` says of algorithms side by side, on one cluster or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from bagua_autotune.cli.output import print_table, say, times
from bagua_simulator import Simulator
from bagua_simulator.algorithms import (
    ALGORITHMS,
    CHANNELS,
    EQUAL,
    LOSSLESS,
    SHARDED,
    SIZES_BYTES,
    Outcome,
    fastest,
)
from bagua_wire.configuration import Configuration
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.knobs import ALGORITHM_KNOB
from bagua_wire.words import describe_part

NOT_SIMULATED = {"powersgd": "a profile does not hold the shapes of its matrices"}


def show_comparison(
    found: Sequence[Sequence[Outcome]], simulator: Simulator, as_json: bool
) -> None:
    """Print the outcomes of each cluster, of which DDP's default is the first.

    Args:
        simulator: the job on one of the clusters.
    """
    if as_json:
        click.echo(json.dumps(_document(found, simulator), indent=2))
        return
    say(f"{simulator.workload.name}: what each algorithm would take, at its best setting")
    columns = ["ranks", "link", "name", "step ms", "exposed", "over DDP", "configuration"]
    print_table(columns, [_row(each, outcomes[0]) for outcomes in found for each in outcomes])
    for outcomes in found:
        say(_advice(outcomes))
    for line in _assumed(simulator):
        say(line)


def _row(outcome: Outcome, default: Outcome) -> list[str]:
    cluster = outcome.cluster
    return [
        f"{cluster.nodes} x {cluster.ranks_per_node}",
        cluster.link or "-",
        outcome.way,
        f"{outcome.step_seconds * 1e3:.4g}",
        f"{outcome.exposed_share:.0%}",
        times(default.step_seconds / outcome.step_seconds),
        _setting(outcome),
    ]


def _setting(outcome: Outcome) -> str:
    """The settings that matter for it; its algorithm stands beside them."""
    sends = ALGORITHMS.get(outcome.way)
    if sends and sends.when == "apart":
        return "-"
    values = {k: v for k, v in outcome.configuration.items() if k != ALGORITHM_KNOB}
    return describe_part(Configuration(values))


def _advice(outcomes: Sequence[Outcome]) -> str:
    """Which is fastest on a cluster: with the same numbers, with equal replicas, of all."""
    cluster = outcomes[0].cluster
    best = {
        "with the same numbers": fastest(outcomes, LOSSLESS),
        "with equal replicas": fastest(outcomes, EQUAL),
        "of all": fastest(outcomes),
    }
    words = "; ".join(f"{among}: {_words(outcome)}" for among, outcome in best.items())
    place = f"{cluster.nodes} x {cluster.ranks_per_node}, {cluster.link or '-'}"
    return f"{place}: fastest {words}"


def _words(outcome: Outcome) -> str:
    return f"{outcome.way}, {outcome.step_seconds * 1e3:.4g} ms"


def _assumed(simulator: Simulator) -> list[str]:
    """What was taken for granted, and what is not known."""
    workload = simulator.workload
    smallest, largest = describe_bytes(SIZES_BYTES[0]), describe_bytes(SIZES_BYTES[-1])
    lines = [
        f"best setting: of buckets of {smallest} to {largest} in powers of two, and at most "
        f"{CHANNELS[-1]} channels; simulate without --algorithms tries more of gradient_allreduce",
        f"computing alone: {workload.compute_seconds * 1e3:.4g} ms on every cluster: each rank "
        "keeps its own batch",
        "8 bits: packed as fast as a V100's memory allows, by assumption; qadam: after its warm-up",
    ]
    if any("/cpu" in tensor.group for tensor in workload.tensors):
        lines.append("these gradients are on CPUs, where packing takes longer, by how much is "
                     "not known")  # fmt: skip
    lines.append(f"{', '.join(SHARDED)}: parameters of 16 bits, gradients of 32, nothing kept "
                 "gathered; memory is not simulated")  # fmt: skip
    lines += [f"not simulated: {name} ({why})" for name, why in NOT_SIMULATED.items()]
    return lines


def _document(found: Sequence[Sequence[Outcome]], simulator: Simulator) -> dict[str, Any]:
    return {
        "model": simulator.workload.name,
        "compute_seconds": simulator.workload.compute_seconds,
        "contention": simulator.contention,
        "launch_seconds": simulator.launch_seconds,
        "not_simulated": NOT_SIMULATED,
        "clusters": [_cluster(outcomes) for outcomes in found],
    }


def _cluster(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    cluster, default = outcomes[0].cluster, outcomes[0]
    return {
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "bandwidth_bytes_per_second": cluster.bandwidth_bytes_per_second,
        "latency_seconds": cluster.latency_seconds,
        "fastest": fastest(outcomes).way,
        "fastest_with_the_same_numbers": fastest(outcomes, LOSSLESS).way,
        "fastest_with_equal_replicas": fastest(outcomes, EQUAL).way,
        "ways": [
            {
                "way": each.way,
                "configuration": dict(each.configuration),
                "step_seconds": each.step_seconds,
                "exposed_share": each.exposed_share,
                "speedup": default.step_seconds / each.step_seconds,
            }
            for each in outcomes
        ],
    }
