"""One host: a network namespace with a link of its own, or this machine's loopback; and what makes
a GPU a host's own: its ranks see no other, and reach others over the link alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .tools import dies_with_parent, path_of


@dataclass(frozen=True)
class Host:
    """Where processes are started.

    Attributes:
        address: at which the other hosts reach it.
        interface: the name of its link.
        namespace: None if it is this machine itself.
        environment: what its processes get beside this process's variables.
        priority: what precedes a command that is in a hurry; empty: it has to wait like others.
    """

    name: str
    address: str
    interface: str
    namespace: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    priority: Sequence[str] = ()

    def popen(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        hurried: bool = False,
        **popen_arguments: Any,
    ) -> subprocess.Popen[bytes]:
        """Start ``command`` there; it is killed when the calling thread is gone, however.

        Args:
            environment: variables beside this process's.
            hurried: at the host's ``priority``.
        """
        prefix = [*dies_with_parent()]
        if self.namespace is not None:
            prefix += [path_of("ip"), "netns", "exec", self.namespace]
        if hurried:
            prefix += self.priority
        variables = {**os.environ, **self.environment, **(environment or {})}
        # A session of its own: Ctrl-C goes to us, and we end what we started.
        arguments = {"start_new_session": True, "stdin": subprocess.DEVNULL, **popen_arguments}
        return subprocess.Popen([*prefix, *command], env=variables, **arguments)


def first_gpus(wanted: int, environment: Mapping[str, str] = os.environ) -> list[str]:
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


def dealt_gpus(gpus: Sequence[str], nodes: int, ranks_per_node: int) -> list[list[str]]:
    """The GPUs of each host, one for each of its ranks.

    Hosts may share one: NCCL takes it for two, as they have different names. Ranks of one host may
    not.

    Raises:
        ValueError: they are too few or too many.
    """
    if len(gpus) != nodes * ranks_per_node:
        raise ValueError(f"{nodes} hosts of {ranks_per_node} ranks, and the GPUs {list(gpus)}")
    return [list(gpus[at : at + ranks_per_node]) for at in range(0, len(gpus), ranks_per_node)]


def gpu_variables(host: str, gpus: list[str]) -> dict[str, str]:
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
