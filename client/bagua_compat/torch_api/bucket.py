"""A bucket of tensors, with the operations that a user-written algorithm gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua_client.algorithms.companion import in_order
from bagua_compat.torch_api.bucket_operations import (
    AsynchronousAverage,
    CentralizedSum,
    PeersAverage,
    RingOfDifferences,
)
from bagua_compat.torch_api.communication import BaguaProcessGroup
from bagua_training.optimizers.contiguity import joined


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
        self,
        python_function: Callable[[str], object],
        group: BaguaProcessGroup | None = None,
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
        operation = CentralizedSum(group, hierarchical, average, scattergather, compression)
        self._operations.append(lambda: self._communicate(operation))

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
        self._operations.append(lambda: self._communicate(operation))
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
        replicas = weight, left_peer_weight, right_peer_weight
        operation = RingOfDifferences(replicas, group, hierarchical, compression)
        self._operations.append(lambda: self._communicate(operation))

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
        self._operations.append(lambda: self._communicate(operation))
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

    def _communicate(self, operation: Callable[[torch.Tensor], object]) -> None:
        flat = _in_one_piece(self._effective())
        if flat is not None:
            operation(flat)
        else:
            operation(copy := self.flattened_tensor())
            self.write(copy)

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
