"""All private names of torch that the client uses, each with the reason why nothing public does.

Where torch changes, this module changes, and nothing else. ``tests/client/test_torch_private.py``
fails when one of the names goes or means something else.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType as BuiltinCommHookType
    from torch._C._distributed_c10d import GradBucket as GradBucket
    from torch._C._distributed_c10d import Store as Store
else:
    BuiltinCommHookType, GradBucket, Store = dist.BuiltinCommHookType, dist.GradBucket, dist.Store

c10d: Any = dist
"""For names that torch.distributed has and does not declare."""

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Of gloo, where the user's group does not tell its own."""

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

HAS_BUCKET_CAPS = "bucket_cap_mb_list" in DistributedDataParallel.__init__.__code__.co_varnames
"""Whether each bucket may have a cap of its own (torch 2.11)."""
HAS_BUCKET_CONFIG = hasattr(ddp_module, "_BucketCapacityConfig")
"""Whether the caps stand in one object (torch 2.12)."""


P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """``torch.compiler.disable``, without importing the compiler for who does not use it."""
    found: Callable[P, T] = cast(Any, torch)._disable_dynamo(function)
    return found


@dataclass(frozen=True)
class Parameters:
    """What torch's reducer is made with: those that trained when the model was wrapped."""

    tensors: list[torch.nn.Parameter]
    expect_sparse: list[bool]
    names: dict[int, str]


_reducers_parameters: WeakKeyDictionary[DistributedDataParallel, Parameters] = WeakKeyDictionary()
"""Of the wrappers of ours, as they were made."""


class WithMoments(DistributedDataParallel):
    """Torch's class with the moments of a forward pass that ours needs.

    Module hooks would be public, but none stands around the buffers.
    """

    _is_followed = False
    """Whether anybody wants to know of them; else torch.compile traces no more than torch's."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._is_followed:
            self._begin_forward()
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        if self._is_followed:
            self._timed_sync(super()._sync_buffers)
        else:
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    @untraced
    def _begin_forward(self) -> None:
        self._forward_begins()

    @untraced
    def _timed_sync(self, sync: Callable[[], None]) -> None:
        with self._buffers_travel():
            sync()

    def _build_params_for_reducer(self) -> Any:
        """Kept: weights may be frozen or thawed later, and torch's reducer goes on with these."""
        built = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = super()._build_debug_param_to_name_mapping(built[0])  # type: ignore[no-untyped-call]
        tensors, expect_sparse = built
        _reducers_parameters[self] = Parameters(tensors, expect_sparse, names)
        return built

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's: ``hook`` carries the buckets from now on, and no way of ours does."""
        known = len(self._comm_hooks)
        self._hook_comes()
        try:
            super().register_comm_hook(state, hook)
        except Exception:
            # Torch lists it before its reducer refuses a second one.
            del self._comm_hooks[known:]
            raise
        finally:
            self._hook_came()

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self._hook_comes()
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]
        self._hook_came()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A class that ``tune`` made for a subclass of somebody's has no name to be found under:
        what it wraps is copied and saved as what it was."""
        made_of = type(self).__dict__.get("_made_of")
        if made_of is None:
            return super().__reduce_ex__(protocol)
        return copyreg._reconstructor, (made_of, object, None), self.__getstate__()  # type: ignore

    # What ours does at a moment: before anything else in a forward pass, around a broadcast of the
    # module's buffers, before a communication hook of the user's is registered, and after that.
    def _forward_begins(self) -> None: ...
    def _buffers_travel(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _hook_comes(self) -> None: ...
    def _hook_came(self) -> None: ...


# The reducer


@dataclass(frozen=True)
class Caps:
    """Where torch's reducer ends its buckets: every one, the first of each dtype and device, and,
    if not empty, each one in turn, the last cap being that of all after it."""

    bucket_bytes: int
    first_bytes: int
    each_bytes: tuple[int, ...] = ()


def split_graphs(ddp: DistributedDataParallel, size_bytes: int) -> None:
    """Have torch.compile split the graphs of a compiled wrapper so that the gradients of a part,
    which become ready together, amount to at most ``size_bytes``: no smaller bucket leaves earlier.
    """
    ddp.bucket_bytes_cap = max(size_bytes, c10d._DEFAULT_FIRST_BUCKET_BYTES)


def parameters_of(ddp: DistributedDataParallel) -> Parameters:
    """No public way leads to the list, whose places are the reducer's indices."""
    if ddp in _reducers_parameters:
        return _reducers_parameters[ddp]
    tensors, expect_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    names = ddp._build_debug_param_to_name_mapping(tensors)  # type: ignore[no-untyped-call]
    return Parameters(tensors, expect_sparse, names)


def caps_of(ddp: DistributedDataParallel) -> Caps:
    """Those in force; torch keeps what the user gave under private names."""
    whole = int(ddp.bucket_bytes_cap)
    if HAS_BUCKET_CONFIG:
        config = ddp._bucket_config
        return Caps(whole, config.first_bucket_bytes_cap, tuple(config.per_bucket_bytes_caps))
    first_bytes = c10d._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else whole
    return Caps(whole, first_bytes, tuple(getattr(ddp, "bucket_bytes_cap_list", ())))


def can_cut(caps: Caps) -> bool:
    """Whether this torch can."""
    if HAS_BUCKET_CAPS:
        return True
    firsts = (caps.bucket_bytes, c10d._DEFAULT_FIRST_BUCKET_BYTES)
    return not caps.each_bytes and caps.first_bytes in firsts


def new_reducer(
    ddp: DistributedDataParallel, parameters: Parameters, caps: Caps, used: Iterable[int] = ()
) -> None:
    """Make ``ddp`` a reducer as its constructor would have with ``caps``; the old one goes first.

    Torch does the same when a wrapper is unpickled. Gradients that are there stay; whoever
    registered a communication hook must do so again.

    Args:
        used: parameters that passes under ``no_sync`` have used since the last reduction, where
            torch looks for unused ones: the old reducer knew, and cannot be asked.

    Raises:
        RuntimeError: out of memory, for one; ``ddp`` has no reducer then.
    """
    # What torch.compile splits graphs by, whenever it compiles: not what is tried just then.
    graph_bytes = ddp.bucket_bytes_cap
    ddp.bucket_bytes_cap = caps.bucket_bytes
    if HAS_BUCKET_CONFIG:
        ddp._bucket_config = replace(
            ddp._bucket_config,
            bucket_bytes_cap=caps.bucket_bytes,
            first_bucket_bytes_cap=min(caps.first_bytes, caps.bucket_bytes),
            per_bucket_bytes_caps=caps.each_bytes,
        )
    else:
        ends = caps.first_bytes, caps.bucket_bytes
        is_default = caps.first_bytes == c10d._DEFAULT_FIRST_BUCKET_BYTES < caps.bucket_bytes
        ddp.bucket_bytes_cap_default = is_default
        ddp.bucket_bytes_cap_list = list(
            caps.each_bytes or (() if is_default or ends[0] == ends[1] else ends)
        )
    # Nothing but these two holds a reducer with its buckets; a failed attempt may have left none.
    vars(ddp).pop("reducer", None)
    ddp.logger = None
    # The constructor takes no weight that was frozen since.
    frozen = [parameter for parameter in parameters.tensors if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        ddp._ddp_init_helper(  # type: ignore[no-untyped-call]
            parameters.tensors, parameters.expect_sparse, parameters.names, ddp.static_graph
        )
    finally:
        ddp.bucket_bytes_cap = graph_bytes
        for parameter in frozen:
            parameter.requires_grad_(False)
    _carry_over(ddp, used)
    ddp._has_rebuilt_buckets = False


def _carry_over(ddp: DistributedDataParallel, used: Iterable[int]) -> None:
    """What the constructor and the user told the reducer before."""
    reducer: Any = ddp.reducer
    if ddp.static_graph:
        reducer._set_static_graph()
        cast(Any, ddp.logger)._set_static_graph()
        ddp._static_graph_delay_allreduce_enqueued = False
    if ddp.mixed_precision is not None:
        reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    if ddp._lazy_init_ran and any(
        hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters
    ):
        reducer._set_optimizer_in_backward()
    if finalizes_by_hand(ddp):
        reducer._set_manual_finalization_required(True)
    for index in used:
        # Before a forward pass that synchronises this only notes that the parameter was used.
        reducer._autograd_hook(index)


def rebuild(ddp: DistributedDataParallel) -> bool:
    """Torch's own check of the last step, and its one re-cut in the order in which gradients
    became ready; what its forward pass does. All ranks come to this together.

    Returns:
        Whether it has re-cut its buckets.

    Raises:
        RuntimeError: the last backward pass did not reach all parameters.
    """
    rebuilt = bool(ddp.reducer._rebuild_buckets())
    ddp._has_rebuilt_buckets |= rebuilt
    return rebuilt


def register_hook(ddp: DistributedDataParallel, hook: Hook) -> None:
    """Straight with the reducer: torch's method would list the hook as the user's."""
    c10d._register_comm_hook(ddp.reducer, None, hook)


@dataclass(frozen=True)
class UserHook:
    """A communication hook that the training registered, or torch for mixed precision: its name as
    torch logs it, what runs (None: it is written in C++), and the state that it is given."""

    name: str
    run: Hook | None
    state: Any


def user_hook_of(ddp: DistributedDataParallel) -> UserHook | None:
    """Torch lists those in Python, also in a copy that has none; its log knows the name of the one
    that its reducer has."""
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    name = logged.get("comm_hook", "")
    if not name:
        return None
    if name.startswith("BuiltinCommHookType."):
        return UserHook(name, None, None)
    run, state = ddp._comm_hooks[-1]
    return UserHook(name, run, state)


def register_user_hook(ddp: DistributedDataParallel, hook: UserHook, run: Hook | None) -> None:
    """Give a new reducer the user's ``hook``; ``run``: in whose place this one runs."""
    cast(Any, ddp.logger)._set_comm_hook_name(hook.name)
    if hook.run is None:
        kind = getattr(BuiltinCommHookType, hook.name.rpartition(".")[2])
        c10d._register_builtin_comm_hook(ddp.reducer, kind)
    else:
        c10d._register_comm_hook(ddp.reducer, hook.state, hook.run if run is None else run)


def rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether torch re-cuts a new reducer's buckets when it has seen gradients become ready."""
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def is_join_enabled(ddp: DistributedDataParallel) -> bool:
    """Whether the last ``join`` that the training entered lets ranks end one by one."""
    return bool(ddp._join_config.enable)


def finalizes_by_hand(ddp: DistributedDataParallel) -> bool:
    """Whether the end of a backward pass is the user's to say (torch 2.15)."""
    return bool(getattr(ddp, "_require_manual_backward_finalization", False))


def leaves_buckets_out(ddp: DistributedDataParallel) -> bool:
    """Whether a step may have buckets that do not travel (torch 2.7)."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


def has_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer is C++'s, and there is one at all."""
    return not (getattr(ddp, "_use_python_reducer", False) or ddp._delay_all_reduce_all_params)


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass under way is over; only from inside it.

    Torch's reducer waits for its buckets in such a callback, which it queues after the last
    bucket's hook: ours is queued anew by the first one, so that it comes after that.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))


# Process groups


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout that the user gave the group, which has no public getter; None: not known.

    A group made without it would wait its backend's default, long after the user's own timeout.
    """
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """For all operations to come, which has no public setter."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


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
