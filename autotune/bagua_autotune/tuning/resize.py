"""What is known of the network by a job that goes on with other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bagua_autotune.costs import Costs, Kind
from bagua_autotune.model.job import Job, JobSpec
from bagua_autotune.tuning.knowledge import Knowledge


def resized_costs(previous: Job, spec: JobSpec, knowledge: Knowledge) -> Costs:
    """What the collectives of the previous job would cost among other ranks; empty: nobody knows.

    Links stay as they are where there were several nodes and still are, or one and still one. An
    all-reduce among n ranks sends 2 (n - 1) / n times the bytes over each, in 2 (n - 1) messages
    one after the other (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
    of workstations", J. Parallel Distrib. Comput. 69, 2009). What else differs is for all of them
    alike, which the fit allows for (see costs.fitting).
    """
    before, now = previous.ranks_per_node, spec.ranks_per_node
    is_same_network = previous.software == spec.software and (len(before) > 1) == (len(now) > 1)
    model = knowledge.fit_whole(previous) if is_same_network else None
    if model is None:
        return {}
    found = {}
    for kind, cost in model.costs.items():
        old, new = _members(kind, before), _members(kind, now)
        if min(old, new) > 1:
            bytes_ratio = (new - 1) / new / ((old - 1) / old)
            found[kind] = replace(
                cost,
                latency_seconds=cost.latency_seconds * (new - 1) / (old - 1),
                seconds_per_byte=cost.seconds_per_byte * bytes_ratio,
            )
    return found


def _members(kind: Kind, ranks_per_node: Sequence[int]) -> int:
    """How many take part where the network decides: all ranks, or one of each node."""
    return sum(ranks_per_node) if kind.hierarchical == "off" else len(ranks_per_node)
