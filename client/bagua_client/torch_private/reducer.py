"""Torch's C++ reducer: how it cuts its buckets, what carries them, and how it is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module
from torch.utils.hooks import RemovableHandle

from bagua_client.torch_private.wrapper import Parameters, kept_parameters

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType as BuiltinCommHookType
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    BuiltinCommHookType, GradBucket = dist.BuiltinCommHookType, dist.GradBucket

c10d: Any = dist
"""For names that torch.distributed has and does not declare."""

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

GRAPH_BYTES = 4 * 1024 * 1024
"""Of the gradients of one part of a compiled wrapper's graph, while it is tuned."""
STEPS_TIMED = 10
"""Of each reducer, at its begin; later only every hundredth."""
HAS_BUCKET_CAPS = "bucket_cap_mb_list" in DistributedDataParallel.__init__.__code__.co_varnames
"""Whether each bucket may have a cap of its own (torch 2.11)."""
HAS_BUCKET_CONFIG = hasattr(ddp_module, "_BucketCapacityConfig")
"""Whether the caps stand in one object (torch 2.12)."""


@dataclass(frozen=True)
class Caps:
    """Where torch's reducer ends its buckets: every one, the first of each dtype and device, and,
    if not empty, each one in turn, the last cap being that of all after it."""

    bucket_bytes: int
    first_bytes: int
    each_bytes: tuple[int, ...] = ()


def split_graphs(ddp: DistributedDataParallel, size_bytes: int) -> None:
    """Have torch.compile split the graphs of a compiled wrapper so that the gradients of a part,
    which become ready together, amount to at most ``size_bytes``, or to what is little enough for
    a tuning: no smaller bucket leaves earlier.
    """
    ddp.bucket_bytes_cap = max(min(size_bytes, GRAPH_BYTES), c10d._DEFAULT_FIRST_BUCKET_BYTES)


def parameters_of(ddp: DistributedDataParallel) -> Parameters:
    """No public way leads to the list, whose places are the reducer's indices."""
    if ddp in kept_parameters:
        return kept_parameters[ddp]
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


@contextmanager
def all_trained(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Nothing of ``parameters`` is frozen: torch takes no frozen one for what follows its
    gradients."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def on_each_gradient(
    parameters: Iterable[torch.nn.Parameter], tell: Callable[[int], None]
) -> list[RemovableHandle]:
    """Call ``tell`` with the index of each of ``parameters`` whose gradient is accumulated."""

    def hook(index: int) -> Callable[[torch.Tensor], None]:
        return lambda _: tell(index)

    # A frozen one too: the next step may be that of another optimizer, with other weights.
    with all_trained(parameters):
        return [
            parameter.register_post_accumulate_grad_hook(hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]


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
    try:
        # The constructor takes no weight that was frozen since.
        with all_trained(parameters.tensors):
            ddp._ddp_init_helper(  # type: ignore[no-untyped-call]
                parameters.tensors, parameters.expect_sparse, parameters.names, ddp.static_graph
            )
    finally:
        ddp.bucket_bytes_cap = graph_bytes
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


def leave_untimed(ddp: DistributedDataParallel) -> None:
    """Have a new reducer take its next steps for later ones: torch times the first ten of each for
    its log, for which the host waits for the GPU (ResNet-50 on H200s: 2.7 of 33 ms). Not in the
    steps before it has cut its buckets, which torch knows by the same count."""
    for _ in range(STEPS_TIMED + 1):  # the log of a step is written before the next
        ddp.reducer.prepare_for_forward()


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


def steps_to_cut(ddp: DistributedDataParallel) -> int:
    """So many steps a new reducer of torch's sees before it cuts its buckets."""
    if not rebuilds(ddp):
        return 0
    return 2 if ddp.static_graph else 1


def is_join_enabled(ddp: DistributedDataParallel) -> bool:
    """Whether the last ``join`` that the training entered lets ranks end one by one."""
    return bool(ddp._join_config.enable)


def leaves_first_step_out(ddp: DistributedDataParallel) -> bool:
    """Whether torch has not reduced a static graph's first step, as it would not after a re-cut.

    It does so at the end of a backward pass that begins at the wrapper's output. In Lightning's
    manual optimization passes begin inside, and Lightning has the first step reduced, once.
    """
    is_over = ddp._lazy_init_ran and not getattr(
        ddp, "_static_graph_delay_allreduce_enqueued", True
    )
    return bool(ddp.static_graph and is_over)


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
    """Call ``callback`` when the backward pass under way is over; at once if none is.

    Torch's reducer waits for its buckets in such a callback, which it queues after the last
    bucket's hook: ours is queued anew by the first one, so that it comes after that.
    """
    if torch._C._current_graph_task_id() == -1:
        callback()
        return
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))
