"""Torch's C++ reducer: how it cuts its buckets, what carries them, and how it is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module
from torch.utils.hooks import RemovableHandle

from bagua_client.torch_private.wrapper import (
    Parameters,
    all_trained,
    called_untraced,
    signature_of_wrapper,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType as BuiltinCommHookType
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    BuiltinCommHookType, GradBucket = dist.BuiltinCommHookType, dist.GradBucket

c10d: Any = dist
"""torch.distributed untyped, for names that its type stubs lack."""

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

GRAPH_BYTES = 4 * 1024 * 1024
"""Gradient bytes in one part of a compiled wrapper's graph while it is being tuned."""
STEPS_TIMED = 10
"""First steps of each reducer that torch times; later only every hundredth."""
HAS_BUCKET_CAPS = "bucket_cap_mb_list" in signature_of_wrapper().parameters
"""Whether each bucket may have its own cap (since torch 2.11)."""
HAS_BUCKET_CONFIG = hasattr(ddp_module, "_BucketCapacityConfig")
"""Whether torch keeps the caps in one object (since torch 2.12)."""


@dataclass(frozen=True)
class Caps:
    """The sizes at which torch's reducer closes its buckets.

    Attributes:
        bucket_bytes: cap of every bucket.
        first_bytes: cap of the first bucket of each dtype and device.
        each_bytes: if not empty, the cap of each bucket in turn; the last one holds for all
            following buckets.
    """

    bucket_bytes: int
    first_bytes: int
    each_bytes: tuple[int, ...] = ()


DEFAULT_CAPS = Caps(25 * 1024 * 1024, c10d._DEFAULT_FIRST_BUCKET_BYTES)
"""Those of a wrapper that is given none."""


def split_graphs(ddp: DistributedDataParallel, size_bytes: int) -> None:
    """Make torch.compile split the graphs of a compiled wrapper by the size of their gradients.

    The gradients of one part become ready together, so a bucket smaller than a part is not sent
    earlier. A part has about ``size_bytes`` of gradients, but no more than GRAPH_BYTES and no less
    than torch's default first bucket.
    """
    ddp.bucket_bytes_cap = max(min(size_bytes, GRAPH_BYTES), c10d._DEFAULT_FIRST_BUCKET_BYTES)


def caps_of(ddp: DistributedDataParallel) -> Caps:
    """The caps in force. Torch keeps what the user gave under private names."""
    whole = int(ddp.bucket_bytes_cap)
    if HAS_BUCKET_CONFIG:
        config = ddp._bucket_config
        return Caps(whole, config.first_bucket_bytes_cap, tuple(config.per_bucket_bytes_caps))
    first_bytes = c10d._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else whole
    return Caps(whole, first_bytes, tuple(getattr(ddp, "bucket_bytes_cap_list", ())))


def can_cut(caps: Caps) -> bool:
    """Whether this release of torch can cut buckets by ``caps``."""
    if HAS_BUCKET_CAPS:
        return True
    firsts = (caps.bucket_bytes, c10d._DEFAULT_FIRST_BUCKET_BYTES)
    return not caps.each_bytes and caps.first_bytes in firsts


def on_each_gradient(
    parameters: Iterable[torch.nn.Parameter], tell: Callable[[int], None]
) -> list[RemovableHandle]:
    """Call ``tell`` with the index of each of ``parameters`` whose gradient is accumulated."""

    def hook(index: int) -> Callable[[torch.Tensor], None]:
        return called_untraced(lambda _: tell(index))

    # Frozen ones too: in the next step another optimizer may train other weights.
    with all_trained(parameters):
        return [
            parameter.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]


def remove(handles: list[RemovableHandle]) -> None:
    """Remove these hooks, and forget them."""
    while handles:
        handles.pop().remove()


def new_reducer(
    ddp: DistributedDataParallel,
    parameters: Parameters,
    caps: Caps,
    used: Iterable[int] = (),
    order: Sequence[int] = (),
) -> None:
    """Replace the reducer of ``ddp`` by one that the constructor would have made with ``caps``. The
    old reducer is freed first.

    Torch does the same when a wrapper is unpickled. Existing gradients are kept. A communication
    hook must be registered again.

    Args:
        used: indices of the parameters that passes under ``no_sync`` have used since the last
            reduction. They are needed where torch looks for unused parameters: the old reducer
            knows them but has no way to ask for them.
        order: indices of the parameters, in the order in which :func:`rebuild` is to cut the final
            buckets, at once; empty: in the order that the first steps show.

    Raises:
        RuntimeError: out of memory, for example; ``ddp`` then has no reducer.
    """
    # torch.compile splits graphs by this attribute, so it must not keep the value that is tried.
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
    # Only these two hold the reducer with its buckets. After a failed attempt there is no reducer.
    vars(ddp).pop("reducer", None)
    ddp.logger = None
    if order:
        parameters = parameters.arranged(order)
    try:
        # The reducer's constructor refuses a weight that was frozen after the model was wrapped.
        with all_trained(parameters.tensors):
            ddp._ddp_init_helper(  # type: ignore[no-untyped-call]
                parameters.tensors, parameters.expect_sparse, parameters.names, ddp.static_graph
            )
    finally:
        ddp.bucket_bytes_cap = graph_bytes
    _carry_over(ddp, used)
    if order:
        # Torch has this for ranks that make no steps of their own: as if the gradients had become
        # ready in the order of the indices.
        cast(Any, ddp.reducer)._push_all_rebuilt_params()
    ddp._has_rebuilt_buckets = False


def _carry_over(ddp: DistributedDataParallel, used: Iterable[int]) -> None:
    """Tell the new reducer what the wrapper's constructor and the user had told the old one."""
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
        # Before a forward pass that synchronises, this only records that the parameter was used.
        reducer._autograd_hook(index)


def leave_untimed(ddp: DistributedDataParallel) -> None:
    """Stop torch from timing the next steps of a new reducer.

    Torch times each reducer's first ten steps for its log, and the host waits for the GPU to do so
    (ResNet-50 on H200s: 2.7 of 33 ms). This raises the reducer's step count past them. Call it only
    after the reducer has cut its buckets, which torch recognises by the same count.
    """
    for _ in range(STEPS_TIMED + 1):  # The log of a step is written before the next one.
        ddp.reducer.prepare_for_forward()


def check_finished(ddp: DistributedDataParallel) -> None:
    """Raise torch's own error if the last backward pass did not reach all parameters.

    Raises:
        RuntimeError: it did not.
    """
    if ddp.logger is not None:  # None if a change has failed half-way.
        ddp.reducer._check_reducer_finalized()


def is_finished(ddp: DistributedDataParallel) -> bool:
    """Whether torch is in no reduction that it has begun."""
    try:
        check_finished(ddp)
    except RuntimeError:
        return False
    return True


def rebuild(ddp: DistributedDataParallel) -> bool:
    """Do what torch's forward pass does first: check the last step, and re-cut the buckets once, in
    the order in which gradients became ready. All ranks must call this together.

    Returns:
        Whether torch has re-cut the buckets.

    Raises:
        RuntimeError: the last backward pass did not reach all parameters.
    """
    rebuilt = bool(ddp.reducer._rebuild_buckets())
    ddp._has_rebuilt_buckets |= rebuilt
    return rebuilt


def bytes_of(bucket: GradBucket) -> int:
    """Return the bytes a bucket sends; for a sparse gradient its values and indices, with a row
    that occurs twice counted twice. The public names of these two would first have to add such rows
    up.
    """
    flat = bucket.buffer()
    if flat.layout is torch.sparse_coo:
        return flat._indices().nbytes + flat._values().nbytes
    return flat.nbytes


def register_hook(ddp: DistributedDataParallel, hook: Hook) -> None:
    """Register ``hook`` directly with the reducer: torch's method would list it as the user's."""
    c10d._register_comm_hook(ddp.reducer, None, called_untraced(hook))


@dataclass(frozen=True)
class UserHook:
    """A communication hook registered by the training, or by torch for mixed precision.

    Attributes:
        name: its name in torch's log.
        run: the function that runs; None: the hook is written in C++.
        state: the state that is passed to the function.
    """

    name: str
    run: Hook | None
    state: Any


def user_hook_of(ddp: DistributedDataParallel) -> UserHook | None:
    """The hook that the reducer of ``ddp`` has; None: it has none.

    The name comes from torch's log. Torch's list of hooks holds only those in Python, and a copied
    wrapper keeps the list although its reducer has no hook.
    """
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    name = logged.get("comm_hook", "")
    if not name:
        return None
    if name.startswith("BuiltinCommHookType."):
        return UserHook(name, None, None)
    run, state = ddp._comm_hooks[-1]
    return UserHook(name, run, state)


def register_user_hook(ddp: DistributedDataParallel, hook: UserHook, run: Hook | None) -> None:
    """Give a new reducer the user's ``hook``; if ``run`` is given, it runs in the hook's place."""
    cast(Any, ddp.logger)._set_comm_hook_name(hook.name)
    if hook.run is None:
        kind = getattr(BuiltinCommHookType, hook.name.rpartition(".")[2])
        c10d._register_builtin_comm_hook(ddp.reducer, kind)
    else:
        ours_or_theirs = hook.run if run is None else called_untraced(run)
        c10d._register_comm_hook(ddp.reducer, hook.state, ours_or_theirs)


def rebuilds(ddp: DistributedDataParallel) -> bool:
    """Whether torch re-cuts a new reducer's buckets in the order that its first steps show."""
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def reaches_all(ddp: DistributedDataParallel) -> bool:
    """Whether each backward pass must compute all gradients; torch refuses to go on otherwise."""
    return not (ddp.static_graph or ddp.find_unused_parameters)


def steps_to_cut(ddp: DistributedDataParallel) -> int:
    """Number of steps after which a new reducer cuts its final buckets."""
    if not rebuilds(ddp):
        return 0
    return 2 if ddp.static_graph else 1


def has_run(ddp: DistributedDataParallel) -> bool:
    """Whether there was any forward pass."""
    return bool(ddp._lazy_init_ran)


def looks_for_unused(ddp: DistributedDataParallel) -> bool:
    """Whether torch searches each step's graph for parameters that get no gradient."""
    return has_reducer(ddp) and not rebuilds(ddp)


def backward_pass() -> int:
    """The number of the backward pass that this thread is inside; -1: of none."""
    return int(torch._C._current_graph_task_id())


def is_in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return backward_pass() != -1


def is_join_enabled(ddp: DistributedDataParallel) -> bool:
    """Whether the last ``join`` that the training entered is enabled: ranks may end one by one."""
    return bool(ddp._join_config.enable)


def leaves_first_step_out(ddp: DistributedDataParallel) -> bool:
    """Whether torch did not reduce the first step of a static graph; nor would it after a re-cut.

    Torch reduces that step at the end of a backward pass that begins at the wrapper's output. In
    Lightning's manual optimization, backward passes begin inside the wrapper, and Lightning itself
    makes torch reduce the first step, only once.
    """
    is_over = ddp._lazy_init_ran and not getattr(
        ddp, "_static_graph_delay_allreduce_enqueued", True
    )
    return bool(ddp.static_graph and is_over)


def finalizes_by_hand(ddp: DistributedDataParallel) -> bool:
    """Whether the user ends each backward pass explicitly (since torch 2.15)."""
    return bool(getattr(ddp, "_require_manual_backward_finalization", False))


def leaves_buckets_out(ddp: DistributedDataParallel) -> bool:
    """Whether some buckets may not be reduced in a step (since torch 2.7)."""
    return bool(getattr(ddp, "skip_all_reduce_unused_params", False))


def has_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether there is a reducer and it is the C++ one."""
    return not (getattr(ddp, "_use_python_reducer", False) or ddp._delay_all_reduce_all_params)


def before_backward_ends(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the present backward pass has computed everything. If the last bucket
    is not full yet, that is before torch's reducer waits for its buckets."""
    torch.autograd.Variable._execution_engine.queue_callback(called_untraced(callback))


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the present backward pass is over; at once if there is none.

    Torch's reducer waits for its buckets in such a callback too, which it queues after the last
    bucket's hook. So ours is queued by another callback, and then runs after torch's.
    """
    if not is_in_backward():
        callback()
        return
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(partial(engine.queue_callback, called_untraced(callback)))
