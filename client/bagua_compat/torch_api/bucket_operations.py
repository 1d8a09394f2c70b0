"""The operations of a bucket on its flat tensor; each returns when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from bagua_client.algorithms.decentralized import MODES, peer_of
from bagua_client.communication.compressed import CompressedSum, RingUpdate
from bagua_client.communication.operations import AllReduce, Operation, PeerAverage, swap
from bagua_compat.torch_api.communication import (
    BaguaProcessGroup,
    Communicator,
    ReduceOp,
    _get_default_group,
)

COMPRESSION = "MinMaxUInt8"
Exchange = Callable[[torch.Tensor, dist.ProcessGroup], None]


class Bucket(Protocol):
    """Tensors that are communicated together."""

    def write(self, flat: torch.Tensor) -> None:
        """Give the tensors the values of ``flat``, one tensor after the other."""


class Ranks:
    """The ranks that exchange: all of a group, or the first of each node, which then
    stand for the others. All ranks of the group make theirs together.

    Args:
        group: None: all ranks of the job.

    Attributes:
        count: so many exchange.
    """

    def __init__(self, group: BaguaProcessGroup | None, hierarchical: bool) -> None:
        self._group = group or _get_default_group()
        self._inside: Communicator | None = None
        self._across: Communicator | None = None
        own = self._group.get_global_communicator()
        if not isinstance(own, Communicator):
            raise ValueError("a bucket is communicated by ranks of its group only")
        self.count = own.nranks()
        if hierarchical:
            inside = self._group.get_intra_node_communicator()
            across = self._group.get_inter_node_communicator()
            assert isinstance(inside, Communicator), "this rank is in the group"
            self._inside = inside
            self._across = across if isinstance(across, Communicator) else None
            nodes = torch.tensor([self._across.nranks() if self._across else 0])
            nodes = nodes.to(inside.device)
            inside.broadcast(nodes, 0)
            self.count = int(nodes)

    def run(self, flat: torch.Tensor, exchange: Exchange, average: bool = True) -> None:
        """Leave on all ranks what ``exchange`` makes of ``flat``, which is averaged (else summed)
        inside each node before that."""
        if self._inside is None:
            group = self._group.torch_group
            assert group is not None, "this rank is in the group"
            exchange(flat, group)
            return
        self._inside.reduce_inplace(flat, 0, ReduceOp.AVG if average else ReduceOp.SUM)
        if self._across is not None:
            exchange(flat, self._across.group)
        self._inside.broadcast(flat, 0)


class CentralizedSum:
    """The sum or the average over all ranks; see ``append_centralized_synchronous_op``."""

    def __init__(
        self,
        group: BaguaProcessGroup | None,
        hierarchical: bool,
        average: bool,
        scattergather: bool,
        compression: str | None,
    ) -> None:
        if compression is not None:
            _check_compression(compression)
            if not scattergather:
                raise ValueError("compression needs scattergather=True")
        self._ranks = Ranks(group, hierarchical)
        self._average = average
        self._exchange = self._sum if compression is None else self._compressed_sum
        self._divisor = self._ranks.count if average else 1

    def __call__(self, flat: torch.Tensor) -> None:
        self._ranks.run(flat, self._exchange, self._average)

    def _sum(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        _run((AllReduce(group),), flat)
        if self._divisor != 1:
            flat.div_(self._divisor)

    def _compressed_sum(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % self._ranks.count)])
        _run(CompressedSum((group, group), self._divisor).operations, padded)
        flat.copy_(padded[: flat.numel()])


class PeersAverage:
    """The operation of ``append_decentralized_synchronous_op``.

    Args:
        peer_weight: where the average goes.
    """

    def __init__(
        self,
        peer_weight: torch.Tensor,
        group: BaguaProcessGroup | None,
        hierarchical: bool,
        peer_selection_mode: str,
    ) -> None:
        if peer_selection_mode not in MODES:
            raise ValueError(
                f"peer_selection_mode must be one of {', '.join(MODES)}, not "
                f"{peer_selection_mode!r}"
            )
        self._ranks = Ranks(group, hierarchical)
        if peer_selection_mode == "shift_one" and self._ranks.count > 1 and self._ranks.count % 2:
            raise ValueError(
                f"peer_selection_mode='shift_one' pairs the ranks, and {self._ranks.count} cannot "
                "be paired"
            )
        self._peer_weight = peer_weight
        self._is_paired = peer_selection_mode == "shift_one" and self._ranks.count > 1
        self._exchanges = 0

    def __call__(self, flat: torch.Tensor) -> None:
        self._peer_weight.copy_(flat)
        self._ranks.run(self._peer_weight, self._exchange)
        self._exchanges += 1

    def copy_back_peer_weight(self, bucket: Bucket) -> None:
        """Give the bucket's tensors the average."""
        with torch.no_grad():
            bucket.write(self._peer_weight)

    def _exchange(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._is_paired:
            peer = peer_of(dist.get_rank(group), self._exchanges, self._ranks.count)
            _run(PeerAverage(group, peer).operations, flat)
        else:
            _run((AllReduce(group),), flat)
            flat.div_(self._ranks.count)


class RingOfDifferences:
    """The operation of ``append_low_precision_decentralized_synchronous_op``.

    Algorithms begin with the rank's own weights for its neighbours'. In buckets that are cut in the
    middle of a training that is wrong, and would stay so: the first exchange sends the replicas.
    """

    def __init__(
        self,
        replicas: Sequence[torch.Tensor],
        group: BaguaProcessGroup | None,
        hierarchical: bool,
        compression: str,
    ) -> None:
        _check_compression(compression)
        self._replicas = replicas
        self._ranks = Ranks(group, hierarchical)
        self._is_first = True

    def __call__(self, flat: torch.Tensor) -> None:
        self._ranks.run(flat, self._exchange)

    def _exchange(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._is_first:
            self._learn_of_neighbours(group)
        _run(RingUpdate(group, flat, self._replicas).operations, flat)

    def _learn_of_neighbours(self, group: dist.ProcessGroup) -> None:
        own, left, right = self._replicas
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        neighbours = (rank - 1) % ranks, (rank + 1) % ranks
        found, work = swap(own, neighbours, group)
        if work is not None:
            work.wait()
        for replica, neighbour in zip((left, right), neighbours, strict=True):
            replica.copy_(found[neighbour])
        self._is_first = False


class AsynchronousAverage:
    """The operation of ``append_asynchronous_model_average_op``.

    A round is made by all ranks. One that calls :meth:`abort` still takes part in the next round,
    which then ends the rounds on all ranks at once: none is left waiting in one.
    """

    def __init__(self, peer_selection_mode: str, group: BaguaProcessGroup | None) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode must be 'all', not {peer_selection_mode!r}")
        self._ranks = Ranks(group, hierarchical=False)
        self._lock = threading.Lock()
        self._is_to_end = self._has_ended = False

    def lock_weight(self) -> None:
        """The weights must not change from now on."""
        self._lock.acquire()

    def unlock_weight(self) -> None:
        """They may."""
        self._lock.release()

    def abort(self) -> None:
        """End the rounds with the next one."""
        self._is_to_end = True

    def reset(self) -> None:
        """Begin rounds again. All ranks, while none is under way."""
        self._is_to_end = self._has_ended = False

    def get_status(self) -> bool:
        """Whether rounds are made; the same on all ranks between two rounds."""
        return not self._has_ended

    def __call__(self, flat: torch.Tensor) -> None:
        self._ranks.run(flat, self._round)

    def _round(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        ends = torch.full((1,), float(self._is_to_end), device=flat.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        if bool(ends):
            self._has_ended = True
            return
        with self._lock:
            sent = flat.clone()
        mean = sent.clone()
        _run((AllReduce(group),), mean)
        with self._lock:
            flat.add_(mean.div_(self._ranks.count).sub_(sent))


def _run(operations: Sequence[Operation], flat: torch.Tensor) -> None:
    for operation in operations:
        work = operation.start(flat)
        if work is not None:
            work.wait()


def _check_compression(compression: str) -> None:
    if compression != COMPRESSION:
        raise ValueError(f"compression must be {COMPRESSION!r}, not {compression!r}")
