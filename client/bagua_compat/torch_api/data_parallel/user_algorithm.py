"""An algorithm that was written for Bagua, as one of ours."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm
from bagua_client.algorithms.base import Weights
from bagua_client.communication.agreement import Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.layout import Partition, cut, describe
from bagua_client.torch_private.reducer import GradBucket
from bagua_compat.torch_api.algorithms.base import Trained
from bagua_compat.torch_api.backend import backend_of
from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.communication.communicator import device_of
from bagua_compat.torch_api.tensor import keeps_gradient
from bagua_wire.knobs import MIB

BUCKET_BYTES = 10 * MIB
"""The size of Bagua's buckets, unless BAGUA_DEFAULT_BUCKET_SIZE is set."""


class UserAlgorithm(Algorithm):
    """Calls the hooks of a Bagua ``AlgorithmImpl`` at their moments. Its buckets are Bagua's: in
    the order of ``init_tensors``, 10 MiB each. Under another configuration than the default they
    are cut as that says, anew after each change of it.

    Torch's reducer leaves all gradients local: gradients are views into its buckets, so operations
    on a Bagua bucket change them in place while the backward pass goes on. As in Bagua a gradient
    that was ensured once is there from then on, whatever an optimizer's ``zero_grad`` does.

    Args:
        ddp: what trains the module.
        declared: has a ``reify(process_group)``, which answers with the ``AlgorithmImpl``.

    Raises:
        TypeError: it has not.
        ValueError: another module has the same name.

    Attributes:
        impl: that.
        buckets: the ones in force.
    """

    moves_weights = True
    leaves_gradients = True
    needs_all_ranks = True

    def __init__(self, ddp: Trained, declared: Any) -> None:
        if isinstance(declared, type) or not hasattr(declared, "reify"):
            raise TypeError(f"an algorithm must be an instance of Algorithm, not {declared!r}")
        self.impl = declared.reify(ddp.process_group)
        self.name = type(self.impl).__name__
        self.buckets: list[BaguaBucket] = []
        # Torch's reducer holds this, and the wrapper, which the module holds, the reducer.
        self._reference = weakref.ref(ddp)
        self.backend = backend_of(ddp.bagua_module_name)
        if self.backend.is_in_use:
            raise ValueError(
                f"another module that is trained has the name {ddp.bagua_module_name!r}: give each "
                "a bagua_module_name of its own"
            )
        self._names: dict[int, str] = {}
        self._tensors: dict[str, Any] = {}
        self._partition: Partition | None = None
        self._size_bytes = 0
        self._gradients: dict[int, torch.Tensor] = {}

    def reify(self, communicator: Communicator) -> UserAlgorithm:
        return self

    def begin_training(self) -> None:
        """Register tensors, cut buckets: weights and optimizer states are the same on all ranks
        now.
        """
        named = self._ddp.module.named_parameters()
        self._names = {id(parameter): name for name, parameter in named}
        tensors = self.impl.init_tensors(self._ddp)
        self._tensors = {tensor.bagua_tensor_name: tensor for tensor in tensors}
        if unknown := sorted(set(self._tensors) - set(self._names.values())):
            raise ValueError(
                f"{self.name}.init_tensors registers {unknown[0]!r}; only parameters of the "
                "module, under their names, can be cut into buckets"
            )
        self._size_bytes = self._size_bytes or self._agreed_size()
        self._cut_buckets()

    def follow(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[RemovableHandle]:
        """Call the hook that the algorithm has for each step of one of them."""

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self.impl.init_post_optimizer_step_hook(self._ddp)(optimizer)

        return [optimizer.register_step_post_hook(stepped) for optimizer in optimizers]

    def training_pass_begins(self, inputs: Any) -> None:
        """Buckets may have been cut anew, or the algorithm may come to another phase."""
        if self.impl.need_reset():
            self._ddp.broadcast_state()
            self.begin_training()
        elif self._partition != self._ddp.tuned_partition:
            self._cut_buckets()
        self._ensure_gradients()
        self.impl.init_forward_pre_hook(self._ddp)(inputs)

    def departs(self, bucket: GradBucket, wire: torch.Tensor) -> None:
        hook = self.impl.init_backward_hook(self._ddp)
        if bucket.index() == 0:  # They may have been cleared since the pass began.
            self._ensure_gradients()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._gradients[id(parameter)] = gradient
            if parameter.grad is None:  # Not used on this rank: zeros, part of torch's bucket.
                parameter.grad = gradient
            hook(self._names[id(parameter)], parameter)

    def backward_ends(self, weights: Weights) -> None:
        self.impl.init_post_backward_hook(self._ddp)()

    def end(self) -> None:
        self.backend.register_ordered_buckets([])

    @property
    def _ddp(self) -> Trained:
        ddp = self._reference()
        assert ddp is not None, "it is called while the module trains"
        return ddp

    def _ensure_gradients(self) -> None:
        """Put zeros in the place of gradients that were cleared, in torch's buckets if they are
        known.
        """
        for tensor in self._tensors.values():
            if tensor.grad is None and keeps_gradient(tensor):
                kept = self._gradients.get(id(tensor))
                tensor.grad = torch.zeros_like(tensor.data) if kept is None else kept.zero_()

    def _cut_buckets(self) -> None:
        self._partition = self._ddp.tuned_partition
        proposed = self._as_bagua() if self._partition is None else self._as_tuned()
        do_flatten = self._ddp.gradient_as_bucket_view
        self.buckets = self.impl.tensors_to_buckets(proposed, do_flatten)
        for bucket in self.buckets:
            self.impl.init_operations(self._ddp, bucket)
        self.backend.register_ordered_buckets(self.buckets)

    def _as_bagua(self) -> list[list[Any]]:
        tensors = list(self._tensors.values())
        specs = describe(list(self._tensors.items()))
        partition = cut(specs, range(len(tensors)), Configuration(self._size_bytes))
        return [[tensors[index] for index in bucket] for bucket in partition]

    def _agreed_size(self) -> int:
        """The size of the buckets: Bagua's where ranks say different things, which would not meet.
        All ranks begin together; that it is not used, the wrapper has said."""
        group = self._ddp.process_group.torch_group
        assert group is not None, "this rank trains the module"
        size_bytes = Environment.read().default_bucket_bytes or BUCKET_BYTES
        is_agreed = not Vote(size_bytes, group, device_of(group)).dissenters()
        return size_bytes if is_agreed else BUCKET_BYTES

    def _as_tuned(self) -> list[list[Any]]:
        proposed = []
        for parameters in self._ddp.tensors_by_bucket():
            names = [self._names[id(parameter)] for parameter in parameters]
            if tensors := [self._tensors[name] for name in names if name in self._tensors]:
                proposed.append(tensors)
        return proposed
