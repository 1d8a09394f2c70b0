"""Process groups: their timeouts, their names, and the rendezvous store."""

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
"""gloo's timeout, used where the timeout of the user's group is not known."""


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout that the user gave the group; None: not known. It has no public getter.

    A group made without it would wait as long as its backend does by default, which may be far
    longer than the user's own timeout.
    """
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` communicates by NCCL from ``device``. The public backend name cannot tell:
    it may name several backends."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None or device.type != "cuda":
        return False
    return isinstance(group._get_backend(device), kind)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of all later operations of ``group``. There is no public setter."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def set_timeout_in(options: Options, timeout: timedelta | None) -> None:
    """Set the timeout in ``options``: c10d warns if it differs from that of the group to make.
    There is no public setter."""
    if timeout is not None:
        options._timeout = timeout


def is_bound_to_device() -> bool:
    """Whether c10d makes NCCL groups by splitting the default group. All ranks must take part in a
    split. There is no public getter."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def store() -> Store | None:
    """The store of the ranks' rendezvous; None: there is none. It has no public getter."""
    try:
        found = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError, AssertionError):
        return None
    return found if isinstance(found, Store) else None


def pg_names() -> dict[Any, Any]:
    """Names of the groups that this process is in. c10d names a new group after their number."""
    found: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    return found


@contextmanager
def counting_groups_from(number: int) -> Iterator[None]:
    """Name a group that is made inside this context after ``number``.

    If only its members make a group, c10d names it after its ranks and the number of groups that
    the rank is in. Ranks that are in different numbers of groups would wait for one another under
    different names. There is no public way to set the name.
    """
    names = pg_names()
    uncounted: Sequence[object] = [object() for _ in range(number - len(names))]
    names.update(dict.fromkeys(uncounted, ""))
    try:
        yield
    finally:
        for name in uncounted:
            del names[name]
