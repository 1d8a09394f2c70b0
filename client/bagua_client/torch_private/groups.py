"""Process groups: their timeouts, their names, and the rendezvous store."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MethodType
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
        timeout = _backend(group, device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def shortest_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The shortest of the timeouts that the group has on its devices; None: none is known."""
    found = [timeout_of(group, device) for device in group._device_types]
    return min((each for each in found if each is not None), default=None)


NCCL_KINDS = ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy")
"""torch's backends that take NCCL's options, as far as this release has them; the second is what
"nccl" means since torch 2.15. None is a subclass of another."""


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend by which ``group`` communicates from ``device``. The public backend
    name may list several."""
    names = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return names.get(device.type, "")


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend: Any = group._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each.
    while type(backend).__name__ == "_ProcessGroupWrapper":
        backend = backend.wrapped_pg
    return backend


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` communicates from ``device`` by an NCCL whose options are known."""
    if device.type != "cuda":
        return False
    kinds = [getattr(dist, name) for name in NCCL_KINDS if hasattr(dist, name)]
    return isinstance(_backend(group, device), tuple(kinds))


def unknown_kind(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend by which ``group`` communicates from this GPU, if how much of the GPU
    it takes is not known (torchcomms, say); else empty."""
    if device.type != "cuda" or is_nccl(group, device):
        return ""
    name = backend_name(group, device)
    return "" if name == dist.Backend.GLOO else f"{name} ({type(_backend(group, device)).__name__})"


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of all later operations of ``group``. torch has a public setter from 2.14
    on."""
    public = getattr(dist, "set_timeout", None)
    if public is not None:
        public(timeout, group)
    else:  # c10d's own private setter leaves out what it does not recognise behind a wrapper.
        for device in group._device_types:
            _backend(group, device)._set_default_timeout(timeout)


def set_timeout_in(options: Options, timeout: timedelta | None) -> None:
    """Set the timeout in ``options``: c10d warns if it differs from that of the group to make.
    There is no public setter."""
    if timeout is not None:
        options._timeout = timeout


def is_bound_to_device() -> bool:
    """Whether c10d makes NCCL groups by splitting the default group. All ranks must take part in a
    split. There is no public getter."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


_own_store: Store | None = None


def store() -> Store | None:
    """The store of the ranks' rendezvous, which has no public getter; None: there is none. A
    process without a default group has one of its own."""
    global _own_store
    if not dist.is_initialized():
        _own_store = _own_store or dist.HashStore()  # type: ignore[attr-defined]
        return _own_store
    try:
        found = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError, AssertionError):
        return None
    return found if isinstance(found, Store) else None


def pg_names() -> dict[Any, Any]:
    """Names of the groups that this process is in. c10d names a new group after their number."""
    found: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    return found


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether it was not destroyed. There is no public way to ask."""
    return group in pg_names()


LIFE = "bagua"


class _Life:
    """The time from one ``init_process_group`` to the next."""


def when_destroyed(callback: Callable[[], object]) -> None:
    """Have ``callback`` called when the default group is destroyed, and all others with it; a
    method is not, if its object is gone by then. There is no public way.

    c10d then forgets the groups of each tag, and so ours, which nobody else has.
    """
    tags: dict[str, list[Any]] = dist.distributed_c10d._world.tags_to_pg
    life = tags.setdefault(LIFE, [_Life()])[0]
    is_method = isinstance(callback, MethodType)
    find = weakref.WeakMethod(callback) if is_method else lambda: callback

    def call() -> None:
        if (found := find()) is not None:
            found()

    weakref.finalize(life, call).atexit = False


def operations_of(group: dist.ProcessGroup) -> int:
    """Return how many operations this rank issued in ``group``; -1: not known. There is no public
    getter."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # Not every backend counts.
        return -1


def counted() -> int:
    """Return how many groups c10d has named by their number in this process."""
    return int(dist.distributed_c10d._world.group_count)


def count_from(number: int) -> None:
    """Make c10d name the next group after ``number``, which must be the same on all ranks. There is
    no public way."""
    dist.distributed_c10d._world.group_count = number


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
