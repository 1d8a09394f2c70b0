"""Process groups: their timeouts, their names, and what the ranks met over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend
    from torch._C._distributed_c10d import Store as Store

    Options = Backend.Options
else:
    Store, Options = dist.Store, object

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Of gloo, where the user's group does not tell its own."""


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout that the user gave the group, which has no public getter; None: not known.

    A group made without it would wait its backend's default, long after the user's own timeout.
    """
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether it communicates by NCCL from ``device``; its public name may be that of several."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None or device.type != "cuda":
        return False
    return isinstance(group._get_backend(device), kind)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """For all operations to come, which has no public setter."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def set_timeout_in(options: Options, timeout: timedelta | None) -> None:
    """Where it says another than a group is made with, c10d warns. It has no public setter."""
    if timeout is not None:
        options._timeout = timeout


def is_bound_to_device() -> bool:
    """Whether c10d makes NCCL groups by splitting that of all ranks, which all must come to."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def store() -> Store | None:
    """What the ranks met over; None: they met otherwise. It has no public getter."""
    try:
        found = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError, AssertionError):
        return None
    return found if isinstance(found, Store) else None


def pg_names() -> dict[Any, Any]:
    """Of the groups that this process is in; c10d names those that come by their number."""
    found: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    return found


@contextmanager
def counting_groups_from(number: int) -> Iterator[None]:
    """A group made inside is named after ``number``.

    c10d names a group that only its members make after its ranks and the number of groups that
    the rank is in. Ranks in different numbers of the user's groups would wait for one another
    under different names. There is no public way to set the name.
    """
    names = pg_names()
    uncounted: Sequence[object] = [object() for _ in range(number - len(names))]
    names.update(dict.fromkeys(uncounted, ""))
    try:
        yield
    finally:
        for name in uncounted:
            del names[name]
