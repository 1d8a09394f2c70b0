"""NCCL's rule for several communicators on one device, whose kernels wait for their peers.

On every device they must be launched in the same order, each begun before the next; else two of
them may fill two devices and wait for one another for ever. From 2.26 on NCCL sees to that where
the variable below is set ("Using multiple NCCL communicators concurrently" in NVIDIA's NCCL
documentation). It reads the variable once, with its first kernel.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from bagua_client.environment import Environment

ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
RACE = "NCCL_LAUNCH_RACE_FATAL"
"""With the order NCCL ends a process that launches from two threads at once; what a training does
besides is none of our business."""
FIRST_VERSION = (2, 26)


def ask_for(environment: MutableMapping[str, str] = os.environ) -> None:
    """Before NCCL begins, where there may be several communicators; later it would not be heard,
    and what the user says comes first."""
    try:
        settings = Environment.read(environment)
    except ValueError:
        return  # Who wraps a model is told.
    is_needed = settings.autotune or settings.default_channels > 1
    has_begun = dist.is_available() and dist.is_initialized()
    if is_needed and not has_begun and ORDER not in environment:
        environment[ORDER] = "1"
        environment.setdefault(RACE, "0")


def obstacle(
    version: tuple[int, ...] | None = None, environment: MutableMapping[str, str] = os.environ
) -> str:
    """Why NCCL does not keep the order; empty: it does.

    Args:
        version: of NCCL; by default that of torch's.
    """
    version = version or torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version[:2] < FIRST_VERSION:
        known, first = (".".join(map(str, numbers[:2])) for numbers in (version, FIRST_VERSION))
        return (
            f"NCCL {known} may wait for ever where several communicators are in use; {first} is "
            "the first that need not"
        )
    if environment.get(ORDER) != "1":
        return (
            f"where several communicators are in use NCCL may wait for ever without {ORDER}=1; "
            "set it before the training starts, or import bagua_client before init_process_group"
        )
    return ""
