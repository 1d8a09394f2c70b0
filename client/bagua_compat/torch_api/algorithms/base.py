"""The classes that a user-written algorithm is made of, and what it sees of the module that it
trains."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from bagua_client import algorithms as ours
from bagua_client.algorithms.base import Registry
from bagua_client.layout import Partition
from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.communication import BaguaProcessGroup
from bagua_compat.torch_api.tensor import Backend

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry"]


class Trained(Protocol):
    """Bagua's ``bagua_ddp``; see
    :class:`bagua_compat.torch_api.data_parallel.bagua_distributed.BaguaDistributedDataParallel`.
    """

    module: nn.Module
    bagua_module_name: str
    process_group: BaguaProcessGroup
    gradient_as_bucket_view: bool

    @property
    def _bagua_backend(self) -> Backend:
        """What runs the operations of the module's buckets."""

    @property
    def tuned_partition(self) -> Partition | None:
        """The layout in force; None: the one that the module was wrapped with."""

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are communicated, with their names."""

    def tensors_by_bucket(self) -> list[list[torch.Tensor]]:
        """The parameters, as the layout in force cuts them."""

    def broadcast_state(self) -> None:
        """Send the first rank's weights, buffers and optimizer states to all."""


class _BaguaRegistry(Registry):
    """The algorithms that ``with_bagua`` takes. A tuning chooses among ours only, which have a
    registry of their own."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.available_algorithms())


GlobalAlgorithmRegistry = _BaguaRegistry()


class Algorithm(metaclass=ABCMeta):  # noqa: B024
    """What ``with_bagua`` is given: it makes an :class:`AlgorithmImpl` for each module.

    The smallest one, which averages gradients in eight bits::

        class InEightBits(Algorithm):
            def reify(self, process_group):
                return InEightBitsImpl(process_group)

        class InEightBitsImpl(AlgorithmImpl):
            def init_operations(self, bagua_ddp, bucket):
                bucket.clear_ops()
                bucket.append_centralized_synchronous_op(
                    scattergather=True, compression="MinMaxUInt8", group=self.process_group
                )
    """

    def reify(self, process_group: BaguaProcessGroup) -> AlgorithmImpl:
        """The instance for one module.

        Raises:
            NotImplementedError: a subclass says which.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reify(process_group)")

    @classmethod
    def init(cls, name: str, **arguments: Any) -> Any:
        """A new instance of the algorithm registered under ``name``.

        Raises:
            KeyError: there is none.
        """
        return GlobalAlgorithmRegistry.get(name)(**arguments)


# Those of ours pass for Bagua's, although a module's instance of them has other methods.
Algorithm.register(ours.Algorithm)


class AlgorithmImpl:
    """An algorithm at work on one module. What a subclass leaves out averages nothing, but is
    called for gradients: :meth:`init_operations` is all that such an algorithm needs.

    Each ``init_...hook`` answers with the function that is then called.

    Args:
        process_group: of the ranks that train the module.
    """

    def __init__(self, process_group: BaguaProcessGroup) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Whether a new phase begins, for which tensors and buckets are made anew. Asked before
        each forward pass in training mode."""
        return False

    def init_tensors(self, bagua_ddp: Trained) -> list[Any]:
        """Return what is communicated, registered under the parameters' names: here the
        gradients.
        """
        found: list[Any] = []
        for name, parameter in reversed(bagua_ddp.bagua_build_params()):
            tensor: Any = parameter
            tensor.bagua_ensure_grad().ensure_bagua_tensor(
                name,
                bagua_ddp.bagua_module_name,
                getter_closure=lambda proxy: proxy.grad,
                setter_closure=lambda proxy, value: setattr(proxy, "grad", value),
            )
            found.append(tensor)
        self._communication_tensor_names = {tensor.bagua_tensor_name for tensor in found}
        return found

    def tensors_to_buckets(
        self, tensors: Sequence[Sequence[Any]], do_flatten: bool
    ) -> list[BaguaBucket]:
        """The buckets, in the order in which they are communicated.

        Args:
            tensors: of each bucket that the configuration in force proposes.
        """
        return [BaguaBucket(each, str(place), do_flatten) for place, each in enumerate(tensors)]

    def init_operations(self, bagua_ddp: Trained, bucket: BaguaBucket) -> None:
        """Give ``bucket`` its operations."""

    def init_forward_pre_hook(self, bagua_ddp: Trained) -> Callable[[Any], object]:
        """Return what is called with the inputs before each forward pass in training mode."""
        return lambda inputs: None

    def init_backward_hook(self, bagua_ddp: Trained) -> Callable[[str, nn.Parameter], object]:
        """Return what is called with the name of each parameter whose gradient is there. They come
        by bucket, when the last gradient of one is there.
        """

        def hook(parameter_name: str, parameter: Any) -> None:
            if parameter_name in self._communication_tensor_names:
                parameter.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp: Trained) -> Callable[[], object]:
        """Return what is called at the end of each backward pass: here it waits for all that has
        started.
        """
        return bagua_ddp._bagua_backend.wait_pending_comm_ops

    def init_post_optimizer_step_hook(
        self, bagua_ddp: Trained
    ) -> Callable[[torch.optim.Optimizer], object]:
        """Return what is called after each step of one of the optimizers, with that optimizer."""
        return lambda optimizer: None
