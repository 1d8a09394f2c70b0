"""Which ranks share a node, by the launcher's environment or by host; all ranks agree on it."""

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
"""Distinguishes machines with the same host name, as NCCL does; it changes at each boot."""


@dataclass(frozen=True)
class Topology:
    """The ranks of a process group by node.

    Attributes:
        nodes: for each node its ranks in the process group, ascending; the nodes are ordered by
            their first rank.
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
        """Return for each local rank the ranks that have it: one of each node."""
        return tuple(
            tuple(node[local] for node in self.nodes if local < len(node))
            for local in range(max(self.ranks_per_node))
        )


class Place(NamedTuple):
    """The location of a rank, as 63-bit numbers that ranks can exchange.

    Attributes:
        source: hash of the environment variable that gave ``node``, or of ``host``; nodes from
            different sources cannot be compared.
        node: hash of the launcher's node number; equal to ``host`` if the launcher sets none.
        host: hash of the machine's name.
    """

    source: int
    node: int
    host: int


def place_of(rank: int, environment: Mapping[str, str] = os.environ) -> Place:
    """The place of this process, whose global rank is ``rank``."""
    host = _number(host_name())
    told = told_node(rank, environment)
    if told is None:
        return Place(_number("host"), host, host)
    source, node = told
    return Place(_number(source), _number(str(node)), host)


def told_node(rank: int, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The environment variable that gives the node of ``rank``, and the node's number.

    That is torchrun's GROUP_RANK, else a variable of another launcher; None: there is none.
    """

    def number(name: str) -> int | None:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else None

    for name in ("GROUP_RANK", "NODE_RANK"):
        if (node := number(name)) is not None:
            return name, node
    if local_world_size := number("LOCAL_WORLD_SIZE"):
        # Ranks on nodes of different sizes number the nodes differently: each size is a source.
        return f"LOCAL_WORLD_SIZE={local_world_size}", rank // local_world_size
    # srun sets both for each task. Processes that a batch script starts in another way inherit the
    # script's own values.
    if number("SLURM_PROCID") == rank and (node := number("SLURM_NODEID")) is not None:
        return "SLURM_NODEID", node
    return None


def host_name() -> str:
    """A name that is equal in all processes of a machine or container, and on no other machine."""
    try:
        boot = BOOT_ID.read_text()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def topology_of(places: Sequence[Place]) -> Topology:
    """The topology of ``places``, which are in rank order. Ranks are grouped by host unless the
    nodes of all ranks come from the same source."""
    by_host = len({place.source for place in places}) > 1
    ranks_of: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place.host if by_host else place.node, []).append(rank)
    return Topology(nodes=tuple(tuple(ranks) for ranks in ranks_of.values()))


def discover(group: dist.ProcessGroup, device: torch.device) -> Topology:
    """Gather the place of every rank of ``group``. All ranks of the group must call it together.

    ``device`` is a device that the group communicates from.
    """
    own = torch.tensor(place_of(dist.get_rank()), dtype=torch.int64, device=device)
    gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return topology_of([Place(*place) for place in torch.stack(gathered).tolist()])


def _number(text: str) -> int:
    """A 63-bit hash of ``text``, which fits in a signed 64-bit integer."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
