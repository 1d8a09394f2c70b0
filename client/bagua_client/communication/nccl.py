"""Limits the NCCL communicators of one GPU so that the kernels of all of them fit on it together.

An NCCL kernel waits for its peers on other GPUs, and a kernel that finds no room on its GPU starts
only when another one has ended. If communicator A fills one GPU and communicator B another, the
peer of each finds no room, and both wait for ever ("Using multiple NCCL communicators concurrently"
in NVIDIA's NCCL documentation). A communicator runs one kernel at a time, with a limited number of
thread blocks, each on one multiprocessor. So the communicators that are in use at once together get
no more thread blocks than the GPU has multiprocessors. Each kernel then finds room once the
training's own kernels, which wait for nobody, have ended.

NCCL can order the launches instead (``NCCL_LAUNCH_ORDER_IMPLICIT``). On two H200 over TCP a step of
a tuned VGG16 then took 124 ms instead of 58 ms (reports/2026-11-gpus.md).
"""

from __future__ import annotations

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
