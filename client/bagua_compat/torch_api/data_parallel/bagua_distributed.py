"""What stands between a module and the wrapper of ours that trains it, under Bagua's names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel
from bagua_client.layout import Partition
from bagua_client.reducer.tunable_reducer import TunableReducer
from bagua_client.torch_private.wrapper import after_module, before_module, let_go
from bagua_compat.torch_api.backend import Backend, backend_of
from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.communication import (
    BaguaProcessGroup,
    _get_default_group,
    from_torch_group,
)
from bagua_compat.torch_api.communication.communicator import device_of
from bagua_compat.torch_api.data_parallel.user_algorithm import UserAlgorithm
from bagua_compat.torch_api.model_parallel.moe import is_moe_param

# The first rank's optimizer state on all ranks.


class _Hole:
    """Stands in place of a tensor that travels by itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device.type


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
    state = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    message = [_hollow(state, tensors) if is_source else None]
    dist.broadcast_object_list(message, src=source, group=group, device=device)
    received: list[torch.Tensor] = []
    state = _filled(message[0], received, device)
    for tensor in tensors if is_source else received:
        travelling = tensor.detach().to(device).contiguous()
        dist.broadcast(travelling, src=source, group=group)
        if not is_source:
            tensor.copy_(travelling)
    if not is_source:
        kept = {each: optimizer.state[each] for each in own if each in optimizer.state}
        optimizer.load_state_dict(state)
        optimizer.state.update(kept)


def _hollow(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with holes for its tensors, which are appended to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Hole(value)
    if isinstance(value, dict):
        return {key: _hollow(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_hollow(item, tensors) for item in value)
    return value


def _filled(value: Any, received: list[torch.Tensor], device: torch.device) -> Any:
    """The same with new tensors in the holes, which are appended to ``received``."""
    if isinstance(value, _Hole):
        on = device if value.device == device.type else torch.device("cpu")
        received.append(torch.empty(value.shape, dtype=value.dtype, device=on))
        return received[-1]
    if isinstance(value, dict):
        return {key: _filled(item, received, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, received, device) for item in value)
    return value


Wrap = Callable[..., DistributedDataParallel]
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
        _let_go_of(module)
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
        self._is_called_itself = wrap is None
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
        parameters = self._tunable.parameters
        return [[parameters[i] for i in bucket] for bucket in self.partition]

    @property
    def partition(self) -> Partition:
        """The layout in force, another after each re-cut."""
        return self._tunable.layout.partition

    @property
    def tuned_partition(self) -> Partition | None:
        """The same; None: what the module was wrapped with is in force."""
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

    def _forward_begins(self, inputs: Any, kwargs: Any) -> Any:
        self.autograd_graph_params.clear()
        if self._is_called_itself:
            inputs, kwargs = before_module(self.wrapper, inputs, kwargs)
        if self.module.training:
            self.bagua_train_step_counter += 1
            if self.user_algorithm is not None:
                self.user_algorithm.training_pass_begins(inputs)
        return inputs, kwargs

    def _forward_ends(self, output: Any) -> Any:
        return after_module(self.wrapper, output) if self._is_called_itself else output


def _module_begins(module: nn.Module, inputs: Any, kwargs: Any) -> Any:
    ddp = vars(module).get("bagua_ddp")  # None: a copy.
    return None if ddp is None else ddp._forward_begins(inputs, kwargs)


def _module_ends(module: nn.Module, inputs: Any, output: Any) -> Any:
    ddp = vars(module).get("bagua_ddp")
    return None if ddp is None else ddp._forward_ends(output)


def _is_ours(algorithm: Any) -> bool:
    """Whoever derives a class of Bagua's from one of ours gives it a ``reify`` as Bagua has it."""
    if not isinstance(algorithm, Algorithm):
        return False
    return "communicator" in inspect.signature(algorithm.reify).parameters


def _bagua_group(group: Any) -> BaguaProcessGroup:
    if isinstance(group, BaguaProcessGroup):
        return group
    return _get_default_group() if group is None else from_torch_group(group)


def _let_go_of(module: nn.Module) -> None:
    """Make what trained the module before, if anything did, let go of it."""
    before = vars(module).get("bagua_ddp")
    if before is not None:
        before.end()


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
