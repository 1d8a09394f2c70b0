"""What makes a GPU a host's own: its ranks see no other, and reach others over the link alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


def first(wanted: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """So many of this machine's, or of those that ``CUDA_VISIBLE_DEVICES`` names.

    Args:
        environment: of this process.

    Raises:
        ValueError: it names too few.
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(gpu) for gpu in range(wanted)] if named is None else named.split(",")
    if len(gpus) < wanted:
        raise ValueError(f"{wanted} ranks need a GPU each, and CUDA_VISIBLE_DEVICES={named}")
    return gpus[:wanted]


def dealt(gpus: Sequence[str], nodes: int, ranks_per_node: int) -> list[list[str]]:
    """The GPUs of each host, one for each of its ranks.

    Hosts may share one: NCCL takes it for two, as they have different names. Ranks of one host may
    not.

    Raises:
        ValueError: they are too few or too many.
    """
    if len(gpus) != nodes * ranks_per_node:
        raise ValueError(f"{nodes} hosts of {ranks_per_node} ranks, and the GPUs {list(gpus)}")
    return [list(gpus[at : at + ranks_per_node]) for at in range(0, len(gpus), ranks_per_node)]


def variables(host: str, gpus: list[str]) -> dict[str, str]:
    """Of the ranks on a host that has these GPUs, and a name like no other."""
    found = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        # NCCL knows hosts by the machine's name, and would go past the link.
        "NCCL_HOSTID": host,
        "NCCL_NET": "Socket",
        "NCCL_MNNVL_ENABLE": "0",  # NVLink between machines
        "NCCL_NVLS_ENABLE": "0",
    }
    if len(gpus) == 1:  # inside the host nothing is left that these are of use for
        found |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    return found
