"""What a rank sees around its training that can keep communication from running beside computing.

Only what is seen is told here: ``bagua-autotune check`` decides what of it is worth a word. What
cannot be read is left out.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua_client.communication.communicator import Communicator
from bagua_client.torch_private import groups as torch_groups
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.wrapper import frames_compiled, is_compiled, splits_at_buckets
from bagua_client.tunable.looks import Observers
from bagua_client.tunable.tunable import Tunable

WATCHED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_BLOCKING_WAIT",
    "NCCL_LAUNCH_MODE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
)
"""Variables that are told, if they are set."""
INFINIBAND = Path("/sys/class/infiniband")
"""The kernel's list of InfiniBand devices:
https://www.kernel.org/doc/Documentation/ABI/stable/sysfs-class-infiniband"""
INTERFACES = Path("/sys/class/net")
OVER_INFINIBAND = "32"
"""The type of an interface for IP over InfiniBand: ARPHRD_INFINIBAND of the kernel's if_arp.h."""
NETWORK_LINE = re.compile(r"NCCL INFO Using network (\S+)")
LOG_BYTES = 2**20
"""The beginning of NCCL's log, where it says how it communicates."""

Seen = dict[str, Any]


class Surroundings:
    """What one rank sees, from when it wraps its model. Makes no message itself.

    Args:
        wrapper: the model's; None: it is sharded.
    """

    def __init__(self, tunable: Tunable, wrapper: DistributedDataParallel | None) -> None:
        self._communicator = tunable.communicator
        self._variables = _variables(os.environ)
        looks = wrapper is not None and torchs.looks_for_unused(wrapper)
        self._passes = PassCount(tunable.parameters, tunable.observers) if looks else None
        self._is_compiled = wrapper is not None and is_compiled(wrapper.module)
        self._is_replicated = wrapper is not None
        self._frames = frames_compiled()

    def reduced(self) -> None:
        """A backward pass that communicates has ended."""
        if self._passes is not None:
            self._passes.ends()

    def look(self) -> bytes:
        """What there is to see now, as JSON."""
        communicator = self._communicator
        seen: Seen = {
            "device": communicator.device.type,
            "backend": torch_groups.backend_name(communicator.everyone, communicator.device),
            "debug_level": torchs.c10d.get_debug_level().name,
            "variables": self._variables,
            "variables_later": _variables(os.environ),
            "infiniband": active_ports(INFINIBAND),
            "gloo_over_infiniband": gloo_over_infiniband(os.environ, INTERFACES),
            "nccl_network": nccl_network(os.environ),
        }
        if self._passes is not None:
            seen["passes"] = self._passes.count
            seen["passes_without_all"] = self._passes.without_all
        if self._is_replicated and frames_compiled():
            seen["splits_at_buckets"] = splits_at_buckets()
            seen["compiled_before"] = self._is_compiled and 0 < self._frames == (frames_compiled())
        return json.dumps(seen, sort_keys=True).encode()


class PassCount:
    """Counts the backward passes that communicate, and those that did not reach all parameters.

    A pass that is made of several, one inside the other, as with reentrant checkpoints, counts as
    one that did not: which parameters it reached is not known.

    Attributes:
        count: passes that have ended.
        without_all: how many of them gave some parameter no gradient on this rank.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], observers: Observers) -> None:
        self.count = self.without_all = 0
        self._number = len(parameters)
        self._pass: int | None = None
        self._reached: set[int] = set()
        torchs.on_each_gradient(parameters, lambda index: observers.call(self._came, index))

    def _came(self, index: int) -> None:
        now = torchs.backward_pass()
        if now != self._pass:
            self._pass, self._reached = now, set()
        self._reached.add(index)

    def ends(self) -> None:
        """The pass under way has communicated."""
        self.count += 1
        self.without_all += len(self._reached) < self._number
        self._pass, self._reached = None, set()


def gather(text: bytes, communicator: Communicator) -> list[Seen]:
    """What the ranks have seen, each time with the ``ranks`` that have seen the same. All ranks
    call it together.

    Args:
        text: what this rank has; see :meth:`Surroundings.look`.
    """
    device, group, ranks = communicator.device, communicator.everyone, communicator.world_size
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(each) for each in torch.cat(lengths).tolist()]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    padded = padded.to(device)
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    found: dict[bytes, list[int]] = {}
    for rank, (each, size) in enumerate(zip(gathered, sizes, strict=True)):
        found.setdefault(bytes(each[:size].tolist()), []).append(rank)
    return [{"ranks": ranks_of, **json.loads(each)} for each, ranks_of in found.items()]


def active_ports(folder: Path) -> list[str]:
    """The files that say of an InfiniBand port that it is active.

    Args:
        folder: the kernel's; see INFINIBAND.
    """
    found = []
    for state in sorted(folder.glob("*/ports/*/state")):
        link = _read(state.with_name("link_layer"))
        # An Ethernet card may be listed too, whether or not its network can do the same.
        if _read(state).startswith("4:") and link == "InfiniBand":
            found.append(str(state))
    return found


def gloo_over_infiniband(environment: Mapping[str, str], folder: Path) -> bool:
    """Whether every interface that gloo is told to use carries IP over InfiniBand.

    Args:
        folder: of the machine's interfaces; see INTERFACES.
    """
    names = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return bool(names) and all(_read(folder / name / "type") == OVER_INFINIBAND for name in names)


def nccl_network(environment: Mapping[str, str]) -> str:
    """The network that NCCL says in its log that it uses, such as ``Socket`` or ``IB``; empty: it
    has said nothing, or writes no file.

    Its variable may have ``%h`` for the host and ``%p`` for the process:
    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug-file
    """
    name = environment.get("NCCL_DEBUG_FILE", "")
    if not name:
        return ""
    host = socket.gethostname().partition(".")[0]
    path = Path(name.replace("%h", host).replace("%p", str(os.getpid())))
    found = NETWORK_LINE.search(_read(path))
    return found.group(1) if found else ""


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in WATCHED if environment.get(name)}


def _read(path: Path) -> str:
    """The beginning of a file; empty: it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(LOG_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
