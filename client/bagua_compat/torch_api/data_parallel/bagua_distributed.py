"""What stands between a module and the wrapper of ours that trains it, under Bagua's names; and an
algorithm that was written for Bagua, as one of ours."""

from __future__ import annotations

import inspect
import io
import pickle
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm
from bagua_client.algorithms.base import Weights
from bagua_client.communication.agreement import Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel
from bagua_client.layout import Partition, cut, describe
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.torch_private.reducer import GradBucket
from bagua_client.torch_private.wrapper import after_module, before_module, let_go
from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.communication import (
    BaguaProcessGroup,
    _get_default_group,
    from_torch_group,
)
from bagua_compat.torch_api.communicator import device_of
from bagua_compat.torch_api.model_parallel.moe import is_moe_param
from bagua_compat.torch_api.tensor import Backend, backend_of, keeps_gradient
from bagua_wire.knobs import MIB

Wrap = Callable[..., DistributedDataParallel]
BUCKET_BYTES = 10 * MIB
"""The size of Bagua's buckets, unless BAGUA_DEFAULT_BUCKET_SIZE is set."""
IGNORED = ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore")


class BaguaDistributedDataParallel:
    """Trains ``module`` on all ranks of a process group; all of them must make it together.

    They begin with the first rank's weights, buffers and optimizer states. A module that was
    trained so before is let go of first, so that it may go on with another algorithm.

    A copy of the module, or one that was saved as a whole, is not trained so.

    Args:
        module: whose weights are trained.
        optimizers: of the module.
        algorithm: one of ours, or one that was written for Bagua.
        process_group: Bagua's or torch's; None: of all ranks.
        bagua_module_name: None: the module's own.
        gradient_as_bucket_view, find_unused_parameters: as torch's.
        wrap: makes the wrapper. None: the module is called itself.

    Attributes:
        wrapper: ours, which carries the gradients and is tuned.
        is_called_itself: the module is, and not the wrapper.
        bagua_train_step_counter: of forward passes in training mode.
        autograd_graph_params: those that have got a gradient in this pass, where unused ones are
            looked for.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Any,
        process_group: Any = None,
        bagua_module_name: str | None = None,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        wrap: Wrap | None = None,
    ) -> None:
        before = vars(module).get("bagua_ddp")
        if before is not None:
            before.end()
        self.module = module
        named: Any = module
        self.bagua_module_name: str = bagua_module_name or named.bagua_module_name
        self.bagua_optimizers = list(optimizers)
        self.process_group = _bagua_group(process_group)
        if self.process_group.torch_group is None:
            raise ValueError(
                f"rank {dist.get_rank()} cannot train {type(module).__name__}: it is not in the "
                f"process group, which has ranks {self.process_group.ranks}"
            )
        self._torch_group = self.process_group.torch_group
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.find_unused_parameters = find_unused_parameters
        self.parameters_to_ignore = _ignored(module)
        self.bagua_train_step_counter = 0
        self.autograd_graph_params: dict[str, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self.is_called_itself = wrap is None
        self.user_algorithm: UserAlgorithm | None = None
        self._own_group: BaguaProcessGroup | None = None
        if not _is_ours(algorithm):
            if device_of(self._torch_group).type == "cpu":
                # Its operations run on a thread, beside those of other modules.
                self.process_group = self._own_group = self.process_group.again()
            algorithm = self.user_algorithm = UserAlgorithm(self, algorithm)
        # Torch calls a weight of the module itself ".weight" here and "weight" there.
        ignored = [form for name in self.parameters_to_ignore for form in (name, f".{name}")]
        module._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment]
        self.wrapper = (wrap or _wrap)(
            module,
            process_group=self._torch_group,
            gradient_as_bucket_view=gradient_as_bucket_view or self.user_algorithm is not None,
            find_unused_parameters=find_unused_parameters,
            optimizers=self.bagua_optimizers,
            algorithm=algorithm,
        )
        self.broadcast_state()
        if self.user_algorithm is not None:
            self.user_algorithm.begin_training()
        self._follow()
        module.bagua_ddp = self  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def bagua_algorithm(self) -> Any:
        """The algorithm's instance for this module."""
        return self.wrapper.algorithm if self.user_algorithm is None else self.user_algorithm.impl

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next passes communicate; else gradients are summed up on each rank."""
        return bool(self.wrapper.require_backward_grad_sync)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.wrapper.require_backward_grad_sync = value

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """The buckets as they are cut now."""
        if self.user_algorithm is not None:
            return self.user_algorithm.buckets
        if show := getattr(self.wrapper.algorithm, "show", None):
            found: list[BaguaBucket] = show(self)
            return found
        return [
            BaguaBucket(tensors, str(place), flatten=False)
            for place, tensors in enumerate(self.tensors_by_bucket())
        ]

    @property
    def _bagua_backend(self) -> Backend:
        """The backend, under the name that user-written algorithms know."""
        return backend_of(self.bagua_module_name)

    def parameters(self) -> list[nn.Parameter]:
        """The module's parameters."""
        return list(self.module.parameters())

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are communicated, with their names; where unused ones are looked
        for, those that the last pass has used."""
        found = [
            (name, parameter)
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad and name not in self.parameters_to_ignore
        ]
        if self.find_unused_parameters and self.autograd_graph_params:
            found = [each for each in found if each[0] in self.autograd_graph_params]
        return found

    def tensors_by_bucket(self) -> list[list[torch.Tensor]]:
        """The parameters, as the layout in force cuts them."""
        tunable = self._tunable
        return [[tunable.parameters[i] for i in bucket] for bucket in tunable.layout.partition]

    @property
    def tuned_partition(self) -> Partition | None:
        """The layout in force, another after each re-cut; None: what the module was wrapped with
        is."""
        tunable = self._tunable
        is_default = tunable.layout.configuration == tunable.default
        return None if is_default else tunable.layout.partition

    @property
    def _tunable(self) -> TunableReducer:
        tunable = self.wrapper._tunable
        assert tunable is not None, "an algorithm was given"
        return tunable

    def end(self) -> None:
        """Train the module no longer. All ranks must call it, between two steps."""
        while self._handles:
            self._handles.pop().remove()
        self.wrapper.algorithm.end()
        if self._own_group is not None:
            self._own_group.leave()
        let_go(self.wrapper)
        del self.module.bagua_ddp

    def broadcast_state(self) -> None:
        """Send the first rank's weights, buffers and optimizer states to all."""
        group = self._torch_group
        device = self.wrapper.device
        if dist.get_backend(group) == dist.Backend.GLOO:
            device = torch.device("cpu")
        source = dist.get_global_rank(group, 0)
        ignored = self.parameters_to_ignore
        own = [p for name, p in self.module.named_parameters() if name in ignored]
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        for name, tensor in tensors:
            if name not in ignored:
                dist.broadcast(tensor.detach(), src=source, group=group)
        for optimizer in self.bagua_optimizers:
            broadcast_optimizer_state(optimizer, group, device, own)

    def _follow(self) -> None:
        module = self.module
        self._handles += [
            module.register_forward_pre_hook(_module_begins, with_kwargs=True),
            module.register_forward_hook(_module_ends),
        ]
        if self.find_unused_parameters:
            for name, parameter in self.bagua_build_params():
                self._handles.append(self._note_use(name, parameter))
        if self.user_algorithm is not None:
            self._handles += self.user_algorithm.follow(self.bagua_optimizers)

    def _note_use(self, name: str, parameter: nn.Parameter) -> RemovableHandle:
        used = self.autograd_graph_params

        def hook(used_one: torch.Tensor) -> None:
            used[name] = parameter

        found: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore
        return found


def _module_begins(module: nn.Module, inputs: Any, kwargs: Any) -> Any:
    ddp: BaguaDistributedDataParallel | None = vars(module).get("bagua_ddp")
    if ddp is None:  # a copy
        return None
    ddp.autograd_graph_params.clear()
    if ddp.is_called_itself:
        inputs, kwargs = before_module(ddp.wrapper, inputs, kwargs)
    if module.training:
        ddp.bagua_train_step_counter += 1
        if ddp.user_algorithm is not None:
            ddp.user_algorithm.training_pass_begins(inputs)
    return inputs, kwargs


def _module_ends(module: nn.Module, inputs: Any, output: Any) -> Any:
    ddp: BaguaDistributedDataParallel | None = vars(module).get("bagua_ddp")
    return after_module(ddp.wrapper, output) if ddp and ddp.is_called_itself else output


def _is_ours(algorithm: Any) -> bool:
    """Whoever derives a class of Bagua's from one of ours gives it a ``reify`` as Bagua has it."""
    if not isinstance(algorithm, Algorithm):
        return False
    return "communicator" in inspect.signature(algorithm.reify).parameters


def _bagua_group(group: Any) -> BaguaProcessGroup:
    if isinstance(group, BaguaProcessGroup):
        return group
    return _get_default_group() if group is None else from_torch_group(group)


def _wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    wrapper = DistributedDataParallel(module, **options)
    # As in Bagua: a pass without gradients on one rank communicates nothing. Torch 2.13 has another
    # name for the argument, but this attribute.
    wrapper.broadcast_buffers = False
    return wrapper


def _ignored(module: nn.Module) -> list[str]:
    """Names of what is not communicated; experts of a mixture are each rank's own."""
    found = {name for attribute in IGNORED for name in getattr(module, attribute, ())}
    experts = [name for name, p in module.named_parameters() if is_moe_param(p)]
    return sorted({name.removeprefix(".") for name in found} | set(experts))


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    device: torch.device,
    own: Iterable[torch.Tensor] = (),
) -> None:
    """Give all ranks of ``group`` the state and the hyperparameters of its first rank. All of them
    must call it.

    Ranks may have made different numbers of steps: one that resumed from a checkpoint may be first.

    Args:
        device: that the group communicates from.
        own: parameters that are each rank's own, with their state.
    """
    source = dist.get_global_rank(group, 0)
    is_source = dist.get_rank(group) == 0
    content = io.BytesIO()
    sent = _WithoutTensors(content)
    if is_source:
        sent.dump(optimizer.state_dict())
    message = [content.getvalue()]
    dist.broadcast_object_list(message, src=source, group=group, device=device)
    received = _WithNewTensors(io.BytesIO(message[0]), device)
    state = None if is_source else received.load()
    for tensor in sent.tensors if is_source else received.tensors:
        travelling = tensor.detach().to(device).contiguous()
        dist.broadcast(travelling, src=source, group=group)
        if not is_source:
            tensor.copy_(travelling)
    if state is not None:
        kept = {each: optimizer.state[each] for each in own if each in optimizer.state}
        optimizer.load_state_dict(state)
        optimizer.state.update(kept)


class _WithoutTensors(pickle.Pickler):
    """Leaves out tensors, which travel by themselves."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: object) -> tuple[torch.Size, torch.dtype, str] | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return value.shape, value.dtype, value.device.type


class _WithNewTensors(pickle.Unpickler):
    """Makes new tensors in the place of those that were left out, to be written to."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._device = device

    def persistent_load(self, left_out: tuple[torch.Size, torch.dtype, str]) -> torch.Tensor:
        shape, dtype, kind = left_out
        device = self._device if kind == self._device.type else torch.device("cpu")
        self.tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return self.tensors[-1]


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

    def __init__(self, ddp: BaguaDistributedDataParallel, declared: Any) -> None:
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
    def _ddp(self) -> BaguaDistributedDataParallel:
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
