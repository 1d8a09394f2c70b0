"""Which ranks share a node, from the launcher's environment or by host, agreed by all ranks."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Tells machines of one name apart, as NCCL does; another at each boot."""


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


class Place(NamedTuple):
    """Where a rank is, in numbers that ranks can exchange.

    Attributes:
        source: of what says the node; nodes of different sources cannot be compared.
        node: as the launcher counts, or ``host`` where it does not tell.
        host: of the machine's name.
    """

    source: int
    node: int
    host: int


def place_of(rank: int, environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process, which has that rank of all."""
    host = _number(host_name())
    told = told_node(rank, environment)
    if told is None:
        return Place(_number("host"), host, host)
    source, node = told
    return Place(_number(source), _number(str(node)), host)


def told_node(rank: int, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """What says the node of that rank, and the node; None: the launcher does not tell it.

    That is torchrun's GROUP_RANK, else what other launchers set.
    """

    def number(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else None

    for name in ("GROUP_RANK", "NODE_RANK"):
        if (node := number(name)) is not None:
            return name, node
    if local_world_size := number("LOCAL_WORLD_SIZE"):
        # Ranks of nodes of different sizes count differently, so these are different sources.
        return f"LOCAL_WORLD_SIZE={local_world_size}", rank // local_world_size
    # srun sets both for each task. Whatever else a batch script starts inherits the script's own.
    if number("SLURM_PROCID") == rank and (node := number("SLURM_NODEID")) is not None:
        return "SLURM_NODEID", node
    return None


def host_name() -> str:
    """Equal for all processes of a machine, or of a container; other machines have another."""
    try:
        boot = BOOT_ID.read_text()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def topology_of(places: Sequence[Place]) -> Topology:
    """Of the ranks' places, by rank: by host unless all ranks have their nodes from one source."""
    by_host = len({place.source for place in places}) > 1
    ranks_of: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place.host if by_host else place.node, []).append(rank)
    return Topology(nodes=tuple(tuple(ranks) for ranks in ranks_of.values()))


def discover(group: dist.ProcessGroup, device: torch.device) -> Topology:
    """Ask every rank of ``group`` for its place. All ranks of the group must call it.

    ``device`` is one that the group can communicate from.
    """
    own = torch.tensor(place_of(dist.get_rank()), dtype=torch.int64, device=device)
    gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return topology_of([Place(*place) for place in torch.stack(gathered).tolist()])


def _number(text: str) -> int:
    """The text as 63 bits, which a signed integer holds; other texts have others."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
