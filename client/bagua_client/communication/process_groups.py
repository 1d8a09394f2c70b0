"""What a communicator's process groups may take of a GPU, and those of models that are gone.

The NCCL communicators of one GPU are limited so that the kernels of all of them fit on it together.

An NCCL kernel waits for its peers on other GPUs, and a kernel that finds no room on its GPU starts
only when another one has ended. If communicator A fills one GPU and communicator B another, the
peer of each finds no room, and both wait for ever ("Using multiple NCCL communicators concurrently"
in NVIDIA's NCCL documentation). A communicator runs one kernel at a time, with a limited number of
thread blocks, each on one multiprocessor. So the communicators that are in use at once together get
no more thread blocks than the GPU has multiprocessors. Each kernel then finds room once the
training's own kernels, which wait for nobody, have ended.

NCCL can order the launches instead (``NCCL_LAUNCH_ORDER_IMPLICIT``). On two H200 over TCP a step of
a tuned VGG16 then took 124 ms instead of 58 ms (reports/2026-11-gpus.md).

Groups of a model that is gone are spares for the next model that the same ranks train. A wrapper is
dropped on each rank when its garbage collector sees to it, so its groups cannot be destroyed then,
which their ranks must do together. Without reuse, each dropped wrapper would leave its groups'
threads and connections for good.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from bagua_client.torch_private import groups as torch_groups
from bagua_wire.knobs import CHANNELS_VALUES

GROUPS_BY_NODE = 3
"""Groups of each channel: inside the node, across nodes, and inside the node again."""
FLAT_SHARE, NODE_SHARE = 0.5, 0.75
"""Shares of the GPU's multiprocessors that our groups get. The user's own group needs the rest: it
has the blocks that NCCL gives it (up to 32). It carries a part of the buckets when all ranks reduce
flat, and almost nothing in a hierarchical reduction."""


def most_channels(device: torch.device) -> int:
    """The highest number of channels whose kernels fit on ``device`` together."""
    room = NODE_SHARE * _multiprocessors(device)
    return max(c for c in CHANNELS_VALUES if c == 1 or c * GROUPS_BY_NODE <= room)


def why_one_channel(device: torch.device, nodes: int) -> str:
    """Why more channels than one would gain nothing between these ranks; empty: they may.

    Args:
        nodes: over which the ranks are spread.
    """
    # NCCL goes through the network inside a host as well where both other ways are switched off.
    is_direct = any(
        os.environ.get(name) != "1" for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
    )
    if device.type == "cuda" and nodes == 1 and is_direct:
        # Over NVLink 100 MB take 0.4 ms; more only take multiprocessors from the training.
        return "one channel: all ranks are on one host, whose links NCCL fills with one"
    return ""


def most_blocks(device: torch.device, by_node: bool) -> int:
    """The number of thread blocks that each of our groups may use on ``device``, on any channel.

    Args:
        by_node: whether the group is one of a hierarchical reduction.
    """
    channels = most_channels(device)
    groups = channels * GROUPS_BY_NODE if by_node else max(1, channels - 1)
    share = NODE_SHARE if by_node else FLAT_SHARE
    return max(1, int(share * _multiprocessors(device)) // groups)


def options(device: torch.device, by_node: bool) -> torch_groups.Options:
    """The options for a new group with the limit of :func:`most_blocks`."""
    found = dist.ProcessGroupNCCL.Options()
    found.config.max_ctas = most_blocks(device, by_node)
    return found


def limit_of(options: torch_groups.Options) -> int:
    """The limit in :func:`options`."""
    return int(options.config.max_ctas)  # type: ignore[attr-defined]


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


OFFERED = 8
"""Number of the oldest spare groups of a kind that are looked at."""
NONE = -1

_spares: dict[Hashable, dict[int, dist.ProcessGroup]] = {}


def keep_spare(kind: Hashable, birth: int, group: dist.ProcessGroup) -> None:
    """Keep ``group``, which this rank needs no more.

    Args:
        kind: what it can be used for instead.
        birth: its number, equal on all ranks that made it together, and larger than that of any
            that one of them made before.
    """
    if torch_groups.is_alive(group):
        if not _spares:
            torch_groups.when_destroyed(forget_destroyed)
        _spares.setdefault(kind, {})[birth] = group


def offer_spares(kind: Hashable) -> list[int]:
    """Return this rank's spare groups, for :func:`choose_spare`: the births of all, then how many
    operations each issued."""
    forget_destroyed()
    found = _spares.get(kind, {})
    births = sorted(found)[:OFFERED]
    rest = [NONE] * (OFFERED - len(births))
    issued = [torch_groups.operations_of(found[birth]) for birth in births]
    return [*births, *rest, *issued, *rest]


def forget_destroyed() -> None:
    """Forget groups that the training destroyed with its own; each has threads until then."""
    for kind, groups in list(_spares.items()):
        alive = {birth: group for birth, group in groups.items() if torch_groups.is_alive(group)}
        if alive:
            _spares[kind] = alive
        else:
            del _spares[kind]


def choose_spare(offers: Sequence[Sequence[int]], partition: Sequence[Sequence[int]]) -> int | None:
    """The birth of the groups that all ranks can use again; None: there are none.

    A group of which its ranks issued different numbers of operations is of no use: the next
    operation of one rank would meet an earlier one of another.

    Args:
        offers: of all ranks, by rank.
        partition: the ranks of each group.
    """
    issued = [dict(zip(each[:OFFERED], each[OFFERED:], strict=True)) for each in offers]
    for birth in sorted(set(issued[0]) - {NONE}):
        counts = [{issued[rank].get(birth, NONE) for rank in ranks} for ranks in partition]
        if all(len(each) == 1 and NONE not in each for each in counts):
            return birth
    return None


def take_spare(kind: Hashable, birth: int) -> dist.ProcessGroup:
    """The spare group that :func:`choose_spare` found."""
    return _spares[kind].pop(birth)
