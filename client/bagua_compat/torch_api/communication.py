"""Bagua's communication: process groups, its view of torch's, and the functions: a communicator's
methods, by default that of all ranks.

``comm`` is what ``get_global_communicator()`` and its like answer with. Ranks (``src``, ``dst``)
are numbered inside it; a rank that is outside gets NON_COMM_MEMBER for it, with which every
function returns at once.
"""

from __future__ import annotations

import atexit
import functools
import io
import os
import pickle
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator as TrainingCommunicator
from bagua_client.torch_private.groups import Store
from bagua_compat.torch_api import env
from bagua_compat.torch_api.communicator import Communicator, ReduceOp, device_of, new_stream
from bagua_compat.torch_api.tensor import backend_of
from bagua_compat.torch_api.utils import apply_flattened_call

get_backend = backend_of

__all__ = [
    "BaguaProcessGroup",
    "CommMember",
    "Communicator",
    "ReduceOp",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_backend",
    "init_process_group",
    "is_initialized",
    "new_group",
    "patch_process_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

TIMEOUT = timedelta(minutes=30)
"""The longest time until all ranks must have come to :func:`init_process_group`, as in Bagua."""
LAST_SECONDS = 0.2
"""A process waits for so long before it ends. In that time gloo's threads let go of the objects of
their last collective; after it, that aborts the process
(https://github.com/pytorch/pytorch/issues/190489). Scripts written for Bagua cannot leave their
groups, as it has no function for that."""


class CommMember(Enum):
    """Marks in place of a communicator."""

    WORLD = "WORLD"
    """The mark of the default group."""
    NON_COMM_MEMBER = "NON_COMM_MEMBER"
    """Marks a communicator that this rank is not in."""


AnyCommunicator = Communicator | CommMember | None


class BaguaProcessGroup:
    """Ranks of the job, with three communicators, each made when it is first asked for.

    Attributes:
        ranks: of the job, ascending.
        stream: on which the communicators run; None: each on one of its own.
        group_name: a number, counted up in each process.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        stream: torch.cuda.Stream | None,
        group_name: str,
        torch_group: dist.ProcessGroup | None,
    ) -> None:
        """``torch_group``: the same ranks; None: this rank is not among them."""
        self.ranks = list(ranks)
        self.stream = stream
        self.group_name = group_name
        # Torch lets go of a group that is destroyed only where nobody else holds on to it.
        self._torch_group = None if torch_group is None else weakref.ref(torch_group)

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """Torch's group of these ranks; None: this rank is not in it.

        Raises:
            RuntimeError: it was destroyed.
        """
        if self._torch_group is None:
            return None
        group = self._torch_group()
        if group is None:
            raise RuntimeError(
                f"rank {env.get_rank()}: the process group of ranks {self.ranks} was destroyed"
            )
        return group

    def again(self) -> BaguaProcessGroup:
        """Return another group of the same ranks, which must make it together. What travels in one
        never meets what travels in the other.
        """
        group = self.torch_group
        assert group is not None, "this rank is in the group"
        training = TrainingCommunicator(group, device_of(group))
        return _wrap(self.ranks, self.stream, training.new_group([range(len(self.ranks))]))

    def leave(self) -> None:
        """Release torch's groups. Nothing may be in flight."""
        comms = [self._global, *vars(self).get("_by_node", ())]
        for group in [comm.group for comm in comms if isinstance(comm, Communicator)]:
            dist.destroy_process_group(group)

    def get_global_communicator(self) -> Communicator | CommMember:
        """The communicator of all the group's ranks."""
        return self._global

    def get_inter_node_communicator(self) -> Communicator | CommMember:
        """The communicator of the first rank of each node. All ranks of the group have to ask for
        this one or for :meth:`get_intra_node_communicator` together the first time, as both are
        made then."""
        return self._by_node[0]

    def get_intra_node_communicator(self) -> Communicator | CommMember:
        """The communicator of the group's ranks on this node; see
        :meth:`get_inter_node_communicator`."""
        return self._by_node[1]

    @functools.cached_property
    def _global(self) -> Communicator | CommMember:
        group = self.torch_group
        return CommMember.NON_COMM_MEMBER if group is None else Communicator(group, self.stream)

    @functools.cached_property
    def _by_node(self) -> tuple[Communicator | CommMember, Communicator | CommMember]:
        group = self.torch_group
        if group is None:
            return CommMember.NON_COMM_MEMBER, CommMember.NON_COMM_MEMBER
        training = TrainingCommunicator(group, device_of(group))
        leaders = training.topology.across[0]
        others = [rank for rank in range(training.world_size) if rank not in leaders]
        across = training.new_group([leaders, *([others] if others else [])])
        inside = training.new_group(training.topology.nodes)
        inter: Communicator | CommMember = CommMember.NON_COMM_MEMBER
        if training.rank in leaders:
            inter = Communicator(across, self.stream)
        return inter, Communicator(inside, self.stream)


@dataclass
class _Process:
    """This process's default group, as torch has one.

    Attributes:
        default: the group of all ranks.
        world: torch's default group at that time, to notice that it was destroyed.
        groups: so many were made.
    """

    default: BaguaProcessGroup | None = None
    world: weakref.ref[dist.ProcessGroup] | None = None
    groups: int = 0


_process = _Process()
_torch_to_bagua_pg_map: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = (
    weakref.WeakKeyDictionary()
)
"""The groups of :func:`patch_process_group`; an entry goes when torch's group is destroyed."""
_pg_group_ranks: weakref.WeakKeyDictionary[BaguaProcessGroup, dict[int, int]] = (
    weakref.WeakKeyDictionary()
)
"""For each group the rank inside it of each rank of the job; Bagua's algorithms read it."""


def is_initialized() -> bool:
    """Whether :func:`init_process_group` was called, and torch's default group still exists."""
    world = _process.world and _process.world()
    return world is not None and dist.is_initialized() and dist.group.WORLD is world


def init_process_group(
    store: Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Make torch's default group, unless it is there, and Bagua's over the same ranks.

    With CUDA it has NCCL for tensors of GPUs and gloo for those of the CPU, else gloo alone. No
    service is started or waited for: where the job is tuned, that is done when a model is wrapped.

    Args:
        store: where the ranks meet; None: at MASTER_ADDR and MASTER_PORT.
        rank, world_size, local_world_size: of this process; -1: as the environment says. They are
            written into it, where ``get_rank()`` and its like read them.

    Raises:
        RuntimeError: it was called before.
    """
    if is_initialized():
        raise RuntimeError("init_process_group was called before in this process")
    given = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    os.environ.update({name: str(value) for name, value in given.items() if value >= 0})
    if not dist.is_initialized():
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            timeout=TIMEOUT,
            store=store,
            rank=env.get_rank(),
            world_size=env.get_world_size(),
        )
        atexit.register(time.sleep, LAST_SECONDS)
    world = dist.group.WORLD
    assert world is not None
    _process.world = weakref.ref(world)
    _process.default = new_group(stream=new_stream())


def new_group(
    ranks: Sequence[int] | None = None, stream: torch.cuda.Stream | None = None
) -> BaguaProcessGroup:
    """A group of some of the job's ranks. All ranks of the job must call it, in one order.

    Args:
        ranks: of the job; None: all. A group of none is empty on every rank.
        stream: for CUDA tensors; None: that of the default group.

    Raises:
        ValueError: the job has no such rank.
        RuntimeError: there is no default group yet.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: call init_process_group first")
    world_size = dist.get_world_size()
    members = sorted(range(world_size) if ranks is None else ranks)
    for rank in members:
        if not 0 <= rank < world_size:
            raise ValueError(f"the job's ranks are 0 to {world_size - 1}, not {rank}")
    made = dist.new_group(members) if members else None
    return _wrap(members, stream, made if isinstance(made, dist.ProcessGroup) else None)


def from_torch_group(
    group: dist.ProcessGroup, stream: torch.cuda.Stream | None = None
) -> BaguaProcessGroup:
    """Bagua's view of a group of torch; both are one, so :meth:`Communicator.abort` ends both.

    ``group`` may be what torch gives to ranks that are outside.
    """
    if not isinstance(group, dist.ProcessGroup):
        return _wrap([], stream, None)
    return _wrap(dist.get_process_group_ranks(group), stream, group)


def patch_process_group() -> None:
    """Add Bagua's methods to torch's ProcessGroup: ``group.bagua_patch()`` and, after that,
    ``bagua_pg`` and ``bagua_get_global_communicator()`` and its like."""

    def bagua_patch(
        self: dist.ProcessGroup, stream: torch.cuda.Stream | None = None
    ) -> dist.ProcessGroup:
        if self not in _torch_to_bagua_pg_map:
            _torch_to_bagua_pg_map[self] = from_torch_group(self, stream)
        return self

    def bagua_pg(self: dist.ProcessGroup) -> BaguaProcessGroup:
        if self not in _torch_to_bagua_pg_map:
            raise AssertionError("call bagua_patch() of this process group first")
        return _torch_to_bagua_pg_map[self]

    kind: Any = dist.ProcessGroup
    kind.bagua_patch = bagua_patch
    kind.bagua_pg = property(bagua_pg)
    for which in ("global", "inter_node", "intra_node"):
        name = f"get_{which}_communicator"
        setattr(kind, f"bagua_{name}", lambda self, name=name: getattr(self.bagua_pg, name)())


def _wrap(
    ranks: Sequence[int], stream: torch.cuda.Stream | None, group: dist.ProcessGroup | None
) -> BaguaProcessGroup:
    _process.groups += 1
    if stream is None and _process.default is not None:
        stream = _process.default.stream
    made = BaguaProcessGroup(ranks, stream, str(_process.groups), group)
    _pg_group_ranks[made] = {rank: inside for inside, rank in enumerate(ranks)}
    return made


def _get_default_group() -> BaguaProcessGroup:
    """The group of all ranks.

    Raises:
        RuntimeError: :func:`init_process_group` was not called.
    """
    if _process.default is None or not is_initialized():
        raise RuntimeError("there is no default group yet: call init_process_group first")
    return _process.default


def _rank_not_in_comm(comm: AnyCommunicator = None) -> bool:
    """Whether this rank is outside of ``comm``; None is the default group's."""
    return comm is CommMember.NON_COMM_MEMBER


def _rank_not_in_group(group: BaguaProcessGroup | None = None) -> bool:
    """Whether this rank is outside of ``group``; None is the default group."""
    return group is not None and group.torch_group is None


def _member(comm: AnyCommunicator) -> Communicator | None:
    """Return the communicator; None: this rank is not in it."""
    if comm is None or comm is CommMember.WORLD:
        comm = _get_default_group().get_global_communicator()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"rank {env.get_rank()}: comm must be a communicator, not {comm!r}: call "
            "get_global_communicator() of the group, one of torch first made Bagua's by "
            "from_torch_group(group)"
        )
    return comm


def send(tensor: torch.Tensor, dst: int, comm: AnyCommunicator = None) -> None:
    """Send ``tensor`` to ``dst``."""
    if member := _member(comm):
        member.send(tensor, dst)


def recv(tensor: torch.Tensor, src: int, comm: AnyCommunicator = None) -> None:
    """Receive ``tensor`` from ``src``."""
    if member := _member(comm):
        member.recv(tensor, src)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: AnyCommunicator = None) -> None:
    """Send ``tensor`` of ``src`` to all ranks."""
    if member := _member(comm):
        member.broadcast(tensor, src)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: AnyCommunicator = None,
) -> None:
    """Reduce into ``recv_tensor`` of ``dst``."""
    if member := _member(comm):
        member.reduce(send_tensor, recv_tensor, dst, op)


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: AnyCommunicator = None
) -> None:
    """Reduce into ``tensor`` of ``dst``."""
    if member := _member(comm):
        member.reduce_inplace(tensor, dst, op)


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: AnyCommunicator = None,
) -> None:
    """Reduce into ``recv_tensor`` of all."""
    if member := _member(comm):
        member.allreduce(send_tensor, recv_tensor, op)


def allreduce_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: AnyCommunicator = None
) -> None:
    """Reduce into ``tensor`` of all."""
    if member := _member(comm):
        member.allreduce_inplace(tensor, op)


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: AnyCommunicator = None,
) -> None:
    """Reduce, and leave each with its part."""
    if member := _member(comm):
        member.reduce_scatter(send_tensor, recv_tensor, op)


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: AnyCommunicator = None
) -> None:
    """Reduce, and leave each with its part, at the start of ``tensor``."""
    if member := _member(comm):
        member.reduce_scatter_inplace(tensor, op)


def allgather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: AnyCommunicator = None
) -> None:
    """Gather on all."""
    if member := _member(comm):
        member.allgather(send_tensor, recv_tensor)


def allgather_inplace(tensor: torch.Tensor, comm: AnyCommunicator = None) -> None:
    """Gather the own parts of all tensors on all."""
    if member := _member(comm):
        member.allgather_inplace(tensor)


def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: AnyCommunicator = None
) -> None:
    """Gather on ``dst``."""
    if member := _member(comm):
        member.gather(send_tensor, recv_tensor, dst)


def gather_inplace(
    tensor: torch.Tensor, count: int, dst: int, comm: AnyCommunicator = None
) -> None:
    """Gather ``count`` elements of each in ``tensor`` of ``dst``."""
    if member := _member(comm):
        member.gather_inplace(tensor, count, dst)


def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: AnyCommunicator = None
) -> None:
    """Send each rank its part of ``send_tensor`` of ``src``."""
    if member := _member(comm):
        member.scatter(send_tensor, recv_tensor, src)


def scatter_inplace(
    tensor: torch.Tensor, count: int, src: int, comm: AnyCommunicator = None
) -> None:
    """Send each rank ``count`` elements of ``tensor`` of ``src``."""
    if member := _member(comm):
        member.scatter_inplace(tensor, count, src)


def alltoall(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: AnyCommunicator = None
) -> None:
    """Send each rank its part, from each rank."""
    if member := _member(comm):
        member.alltoall(send_tensor, recv_tensor)


def alltoall_inplace(tensor: torch.Tensor, comm: AnyCommunicator = None) -> None:
    """Send each rank its part of ``tensor``, from each rank, into ``tensor`` itself."""
    if member := _member(comm):
        member.alltoall_inplace(tensor)


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: AnyCommunicator = None,
) -> None:
    """Send each rank, from each rank, a part of any size from any place."""
    if member := _member(comm):
        member.alltoall_v(
            send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs
        )


def alltoall_v_inplace(
    tensor: torch.Tensor,
    counts: Sequence[int],
    displs: Sequence[int],
    comm: AnyCommunicator = None,
) -> None:
    """Send each rank, from each rank, a part of any size from any place, into ``tensor`` itself."""
    if member := _member(comm):
        member.alltoall_v_inplace(tensor, counts, displs)


def barrier(comm: AnyCommunicator = None) -> None:
    """Wait for all."""
    if member := _member(comm):
        member.barrier()


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], src: int = 0, comm: AnyCommunicator = None
) -> None:
    """:func:`broadcast` of several tensors of one dtype in one message."""
    if member := _member(comm):
        _run_coalesced(tensors, member.broadcast, src)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: AnyCommunicator = None
) -> None:
    """:func:`allreduce_inplace` of several tensors of one dtype in one message."""
    if member := _member(comm):
        _run_coalesced(tensors, member.allreduce_inplace, op)


def _run_coalesced(
    tensors: Sequence[torch.Tensor], call: Callable[[torch.Tensor, int], None], argument: int
) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            f"rank {env.get_rank()}: tensors that travel in one message must have one dtype, not "
            f"{', '.join(sorted(map(str, dtypes)))}"
        )
    if tensors:
        apply_flattened_call(tensors, call, [argument])


def broadcast_object(obj: object, src: int = 0, comm: AnyCommunicator = None) -> object:
    """The object of ``src``, pickled. A rank that is not in ``comm`` gets its own back."""
    member = _member(comm)
    if member is None:
        return obj
    buffer = io.BytesIO()
    if member.rank() == src:
        pickle.dump(obj, buffer)
    size = torch.tensor([buffer.tell()], dtype=torch.int64, device=member.device)
    member.broadcast(size, src)
    content = torch.zeros(int(size), dtype=torch.uint8, device=member.device)
    if member.rank() == src:
        content.copy_(torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8))
    member.broadcast(content, src)
    if member.rank() == src:
        return obj
    found: object = pickle.loads(content.cpu().numpy().tobytes())
    return found
