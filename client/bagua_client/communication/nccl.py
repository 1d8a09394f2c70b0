"""Several NCCL communicators on one GPU, whose kernels wait for their peers: they fit it together.

A kernel that finds no place on its GPU begins when another one has ended. Where that one waits for
a peer, whose GPU is filled by the first one's peer, both wait for ever ("Using multiple NCCL
communicators concurrently" in NVIDIA's NCCL documentation). A communicator runs one kernel at a
time, of as many thread blocks as it is given, each on one multiprocessor. So the communicators that
are in use at once get no more of them than the GPU has multiprocessors, and each kernel finds its
place when the training's own, which wait for nobody, have ended.

NCCL can be told to order the launches instead (``NCCL_LAUNCH_ORDER_IMPLICIT``). On two
H200 over TCP a tuned VGG16 then took 124 ms a step instead of 58 (docs/performance.md).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from bagua_client.configuration import CHANNELS_VALUES
from bagua_client.torch_private import groups as torch_groups

GROUPS_BY_NODE = 3
"""For each channel: inside the node, across nodes, and inside again."""
FLAT_SHARE, NODE_SHARE = 0.5, 0.75
"""Of the multiprocessors. The user's own group, which has the blocks that NCCL gives it (up to 32),
carries a part of the buckets where all reduce flat, and next to nothing by node."""


def most_channels(device: torch.device) -> int:
    """So many have room on ``device``."""
    room = NODE_SHARE * _multiprocessors(device)
    return max(c for c in CHANNELS_VALUES if c == 1 or c * GROUPS_BY_NODE <= room)


def most_blocks(device: torch.device, by_node: bool) -> int:
    """So many thread blocks each of our groups can have on ``device``, on whichever channel.

    Args:
        by_node: those of a hierarchical reduction.
    """
    channels = most_channels(device)
    groups = channels * GROUPS_BY_NODE if by_node else max(1, channels - 1)
    share = NODE_SHARE if by_node else FLAT_SHARE
    return max(1, int(share * _multiprocessors(device)) // groups)


def options(device: torch.device, by_node: bool) -> torch_groups.Options:
    """Those that such a group is made with."""
    found = dist.ProcessGroupNCCL.Options()
    found.config.max_ctas = most_blocks(device, by_node)
    return found


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
