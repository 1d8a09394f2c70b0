"""A bucket of tensors, with the operations on its flat tensor that a user-written algorithm gives
it; each returns when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms.companion import in_order
from bagua_client.algorithms.decentralized import MODES, peer_of
from bagua_client.communication.compressed_exchange import CompressedSum, RingUpdate
from bagua_client.communication.operations import Operation, PeerAverage, swap
from bagua_compat.torch_api.communication import (
    BaguaProcessGroup,
    Communicator,
    ReduceOp,
    _get_default_group,
)
from bagua_training.optimizers.contiguity import joined

COMPRESSION = "MinMaxUInt8"
Exchange = Callable[[torch.Tensor, dist.ProcessGroup], None]


class BaguaBucket:
    """Registered tensors that are communicated together.

    Operations run in the order in which they were appended, once all tensors are marked ready, on
    what the tensors' getters find at that time. Those that communicate average or sum it in place.

    Args:
        tensors: at least one, all of one module, dtype and device.
        name: unique in the module.
        flatten: move what is communicated into one piece of memory.
        alignment: a tensor of zeros is added, so that the number of elements divides by it.

    Raises:
        ValueError: the tensors are not all of one module.

    Attributes:
        padding_tensor: the zeros; None: none are needed.
    """

    def __init__(
        self, tensors: Sequence[Any], name: str, flatten: bool, alignment: int = 1
    ) -> None:
        modules = {getattr(tensor, "bagua_module_name", None) for tensor in tensors}
        if len(modules) != 1:
            raise ValueError(f"bucket {name!r} needs tensors of one module, not of {len(modules)}")
        self.tensors = list(tensors)
        self.name = name
        self.flatten = flatten
        (self.bagua_module_name,) = modules
        self.padding_tensor: Any = None
        missing = -sum(tensor.numel() for tensor in tensors) % alignment
        if missing:
            zeros: Any = tensors[0].detach().new_zeros(missing)
            self.padding_tensor = zeros.ensure_bagua_tensor(
                f"bagua_padding_tensor_bucket_{name}", self.bagua_module_name
            )
        self._operations: list[Callable[[], object]] = []
        if flatten:
            self._flatten()

    @property
    def backend_bucket(self) -> BaguaBucket:
        """The bucket as the backend sees it: this one."""
        return self

    def bytes(self) -> int:
        """The number of bytes that are communicated, without the padding."""
        effective = [tensor.bagua_getter_closure() for tensor in self.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in effective)

    def flattened_tensor(self) -> torch.Tensor:
        """A copy of what is communicated, one tensor after the other, and of the padding."""
        return torch.cat([tensor.reshape(-1) for tensor in self._effective()])

    def check_flatten(self) -> bool:
        """Whether what is communicated lies in one piece of memory."""
        return _in_one_piece(self._effective()) is not None

    def append_python_op(
        self, python_function: Callable[[str], object], group: BaguaProcessGroup | None = None
    ) -> None:
        """Call the function with the bucket's name; it may do whatever it likes.

        It runs on a thread of its own on the CPU, and on a stream of its own on CUDA, where it must
        not wait for the device.
        """
        self._operations.append(lambda: python_function(self.name))

    def append_centralized_synchronous_op(
        self,
        hierarchical: bool = False,
        average: bool = True,
        scattergather: bool = False,
        compression: str | None = None,
        group: BaguaProcessGroup | None = None,
    ) -> None:
        """Sum or average over all ranks of ``group`` (None: all ranks).

        Args:
            hierarchical: inside each node first; nodes then count alike in an average.
            average: else the sum.
            scattergather: each rank sums up one part of the bucket; compression needs that.
            compression: ``MinMaxUInt8``: eight bits a number; None: none.

        Raises:
            ValueError: another compression, or one without ``scattergather``.
        """
        if compression is not None:
            _check_compression(compression)
            if not scattergather:
                raise ValueError("compression needs scattergather=True")
        ranks = _Ranks(group, hierarchical)
        divisor = ranks.count if average else 1

        def plainly(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
            dist.all_reduce(flat, group=group)
            if divisor != 1:
                flat.div_(divisor)

        def compressed(flat: torch.Tensor, group: dist.ProcessGroup) -> None:
            padded = torch.cat([flat, flat.new_zeros(-flat.numel() % ranks.count)])
            _run(CompressedSum((group, group), divisor).operations, padded)
            flat.copy_(padded[: flat.numel()])

        exchange = plainly if compression is None else compressed
        self._append(lambda flat: ranks.run(flat, exchange, average))

    def append_decentralized_synchronous_op(
        self,
        peer_weight: torch.Tensor,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        group: BaguaProcessGroup | None = None,
    ) -> PeersAverage:
        """Average a copy, ``peer_weight``, with all ranks or with one other; the bucket stays as it
        is until ``copy_back_peer_weight`` of what this answers with is called.

        Args:
            peer_weight: such as ``flattened_tensor()``.
            hierarchical: average inside each node first, then the nodes.
            peer_selection_mode: ``all``, or ``shift_one``: another rank each time.
            group: None: all ranks.

        Raises:
            ValueError: another mode.
        """
        operation = PeersAverage(peer_weight, group, hierarchical, peer_selection_mode)
        self._append(operation)
        return operation

    def append_low_precision_decentralized_synchronous_op(
        self,
        weight: torch.Tensor,
        left_peer_weight: torch.Tensor,
        right_peer_weight: torch.Tensor,
        hierarchical: bool = True,
        compression: str = "MinMaxUInt8",
        group: BaguaProcessGroup | None = None,
    ) -> None:
        """Send the change since the last time to two neighbours on a ring, in eight bits, as
        :class:`bagua_client.algorithms.LowPrecisionDecentralizedAlgorithm` does.

        Args:
            weight, left_peer_weight, right_peer_weight: what is known of this rank and of its
                neighbours, such as ``flattened_tensor()`` at the start.
            hierarchical: average inside each node first; the nodes' first ranks form the ring.
            compression: ``MinMaxUInt8``.
            group: None: all ranks.

        Raises:
            ValueError: another compression.
        """
        _check_compression(compression)
        replicas = weight, left_peer_weight, right_peer_weight
        self._append(_RingOfDifferences(replicas, _Ranks(group, hierarchical)))

    def append_asynchronous_model_average_op(
        self, peer_selection_mode: str, group: BaguaProcessGroup | None = None
    ) -> AsynchronousAverage:
        """Average the bucket while the training goes on: what it has changed meanwhile is kept.

        Args:
            peer_selection_mode: ``all``.
            group: None: all ranks.

        Returns:
            What locks the weights while they must not change.

        Raises:
            ValueError: another mode.
        """
        operation = AsynchronousAverage(peer_selection_mode, group)
        self._append(operation)
        return operation

    def clear_ops(self) -> BaguaBucket:
        """Remove all operations."""
        self._operations = []
        return self

    @torch.no_grad()
    def run(self) -> None:
        """The operations, one after the other."""
        for operation in self._operations:
            operation()

    def write(self, flat: torch.Tensor) -> None:
        """Take over the values of ``flat``, which has the layout of :meth:`flattened_tensor`."""
        parts = self._effective()
        for part, values in zip(parts, in_order(parts)(flat), strict=True):
            part.copy_(values)

    def _append(self, operation: Callable[[torch.Tensor], object]) -> None:
        def communicate() -> None:
            flat = _in_one_piece(self._effective())
            if flat is not None:
                operation(flat)
            else:
                operation(copy := self.flattened_tensor())
                self.write(copy)

        self._operations.append(communicate)

    @property
    def _all(self) -> list[Any]:
        return self.tensors if self.padding_tensor is None else [*self.tensors, self.padding_tensor]

    def _effective(self) -> list[torch.Tensor]:
        return [tensor.bagua_getter_closure().detach() for tensor in self._all]

    def _flatten(self) -> None:
        # Gradients that are not there yet come as views into torch's bucket: in one piece.
        if any(tensor.bagua_getter_closure() is None for tensor in self.tensors):
            return
        if self.check_flatten():
            return
        storage, offset = self.flattened_tensor().untyped_storage(), 0
        for tensor in self._all:
            tensor.bagua_set_storage(storage, offset)
            offset += tensor.numel()


def _in_one_piece(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A flat view of tensors that lie one after the other; None: they do not."""
    return joined(tensors) if all(tensor.is_contiguous() for tensor in tensors) else None


class _Ranks:
    """The ranks that exchange: all of a group, or the first of each node, which then
    stand for the others. All ranks of the group make theirs together.

    Args:
        group: None: all ranks of the job.

    Attributes:
        count: so many exchange.
    """

    def __init__(self, group: BaguaProcessGroup | None, hierarchical: bool) -> None:
        group = group or _get_default_group()
        across = group.get_global_communicator()
        if not isinstance(across, Communicator):
            raise ValueError("a bucket is communicated by ranks of its group only")
        self.count = across.nranks()
        self._inside: Communicator | None = None
        self._across: Communicator | None = across
        if hierarchical:
            inside, across = (
                group.get_intra_node_communicator(),
                group.get_inter_node_communicator(),
            )
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
        if self._inside is not None:
            self._inside.reduce_inplace(flat, 0, ReduceOp.AVG if average else ReduceOp.SUM)
        if self._across is not None:
            exchange(flat, self._across.group)
        if self._inside is not None:
            self._inside.broadcast(flat, 0)


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
        self._ranks = _Ranks(group, hierarchical)
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

    def copy_back_peer_weight(self, bucket: BaguaBucket) -> None:
        """Give the bucket's tensors the average."""
        with torch.no_grad():
            bucket.write(self._peer_weight)

    def _exchange(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._is_paired:
            peer = peer_of(dist.get_rank(group), self._exchanges, self._ranks.count)
            _run(PeerAverage(group, peer).operations, flat)
        else:
            dist.all_reduce(flat, group=group)
            flat.div_(self._ranks.count)


class _RingOfDifferences:
    """Algorithms begin with the rank's own weights for its neighbours'. In buckets that are cut in
    the middle of a training that is wrong, and would stay so: the first exchange sends the
    replicas.
    """

    def __init__(self, replicas: Sequence[torch.Tensor], ranks: _Ranks) -> None:
        self._replicas = replicas
        self._ranks = ranks
        self._is_first = True

    def __call__(self, flat: torch.Tensor) -> None:
        self._ranks.run(flat, self._exchange)

    def _exchange(self, flat: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._is_first:
            self._learn_of_neighbours(group)
            self._is_first = False
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


class AsynchronousAverage:
    """The operation of ``append_asynchronous_model_average_op``.

    A round is made by all ranks. One that calls :meth:`abort` still takes part in the next round,
    which then ends the rounds on all ranks at once: none is left waiting in one.
    """

    def __init__(self, peer_selection_mode: str, group: BaguaProcessGroup | None) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode must be 'all', not {peer_selection_mode!r}")
        self._ranks = _Ranks(group, hierarchical=False)
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
        dist.all_reduce(mean, group=group)
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
