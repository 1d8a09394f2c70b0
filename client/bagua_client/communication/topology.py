"""Which ranks share a node, from torchrun's environment, agreed by all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Topology:
    """The ranks of a process group by node.

    Attributes:
        nodes: for each node its ranks (numbered inside the process group), ascending; nodes
            ordered by their first rank.
    """

    nodes: tuple[tuple[int, ...], ...]

    @property
    def ranks_per_node(self) -> tuple[int, ...]:
        return tuple(len(node) for node in self.nodes)

    @property
    def is_hierarchical(self) -> bool:
        """Whether reducing inside the nodes first can differ from a flat reduction."""
        return len(self.nodes) > 1 and max(self.ranks_per_node) > 1

    @property
    def is_uniform(self) -> bool:
        return len(set(self.ranks_per_node)) == 1

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """For each local rank the ranks that have it, one of each node that is large enough."""
        return tuple(
            tuple(node[local] for node in self.nodes if local < len(node))
            for local in range(max(self.ranks_per_node))
        )


def node_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The node this process is on: torchrun's GROUP_RANK, else what other launchers set."""
    for name in ("GROUP_RANK", "NODE_RANK"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    rank, local_world_size = environment.get("RANK", ""), environment.get("LOCAL_WORLD_SIZE", "")
    if rank.isdigit() and local_world_size.isdigit() and int(local_world_size) > 0:
        return int(rank) // int(local_world_size)
    return 0


def discover(group: dist.ProcessGroup, device: torch.device) -> Topology:
    """Ask every rank of ``group`` for its node. All ranks of the group must call it.

    ``device`` is one that the group can communicate from.
    """
    gathered = [
        torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))
    ]
    own = torch.tensor([node_rank()], dtype=torch.int64, device=device)
    dist.all_gather(gathered, own, group=group)
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(gathered):
        ranks_of.setdefault(int(node.item()), []).append(rank)
    return Topology(nodes=tuple(tuple(ranks) for ranks in ranks_of.values()))
