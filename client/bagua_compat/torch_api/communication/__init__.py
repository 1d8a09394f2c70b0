"""Bagua's communication: ``groups`` of ranks, the ``communicator`` of a group, in ``reductions``
what torch's backends lack, and here the functions: a communicator's methods, by default that of all
ranks.

``comm`` is what ``get_global_communicator()`` and its like answer with. Ranks (``src``, ``dst``)
are numbered inside it; a rank that is outside gets NON_COMM_MEMBER for it, with which every
function returns at once. What each does and raises stands beside the method of the same name in
:class:`~bagua_compat.torch_api.communication.communicator.Communicator`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence

import torch

from bagua_compat.torch_api.backend import backend_of as get_backend
from bagua_compat.torch_api.communication.communicator import Communicator
from bagua_compat.torch_api.communication.groups import (
    AnyCommunicator,
    BaguaProcessGroup,
    CommMember,
    _get_default_group,
    _pg_group_ranks,
    _rank_not_in_comm,
    _rank_not_in_group,
    _torch_to_bagua_pg_map,
    from_torch_group,
    init_process_group,
    is_initialized,
    new_group,
    patch_process_group,
)
from bagua_compat.torch_api.communication.reductions import ReduceOp
from bagua_compat.torch_api.env import get_rank

__all__ = [
    "BaguaProcessGroup",
    "CommMember",
    "Communicator",
    "ReduceOp",
    "_get_default_group",
    "_pg_group_ranks",
    "_rank_not_in_comm",
    "_rank_not_in_group",
    "_torch_to_bagua_pg_map",
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


def _member(comm: AnyCommunicator) -> Communicator | None:
    """Return the communicator; None: this rank is not in it."""
    if comm is None or comm is CommMember.WORLD:
        comm = _get_default_group().get_global_communicator()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if not isinstance(comm, Communicator):
        raise TypeError(
            f"rank {get_rank()}: comm must be a communicator, not {comm!r}: call "
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


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor], src: int = 0, comm: AnyCommunicator = None
) -> None:
    """:func:`broadcast` of several tensors of one dtype in one message."""
    if (member := _member(comm)) and tensors:
        flat = _joined(tensors)
        member.broadcast(flat, src)
        _write_back(flat, tensors)


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


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: AnyCommunicator = None
) -> None:
    """:func:`allreduce_inplace` of several tensors of one dtype in one message."""
    if (member := _member(comm)) and tensors:
        flat = _joined(tensors)
        member.allreduce_inplace(flat, op)
        _write_back(flat, tensors)


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
    """The same, to the start of ``tensor``."""
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
    """The same, into ``tensor`` itself."""
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
    """The same, into ``tensor`` itself."""
    if member := _member(comm):
        member.alltoall_v_inplace(tensor, counts, displs)


def barrier(comm: AnyCommunicator = None) -> None:
    """Wait for all."""
    if member := _member(comm):
        member.barrier()


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(
            f"rank {get_rank()}: tensors that travel in one message must have one dtype, not "
            f"{', '.join(sorted(map(str, dtypes)))}"
        )
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _write_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
