"""A model's weights as flat tensors, and the moments of a step at which they may travel."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm
from bagua_client.algorithms.companion import in_order
from bagua_client.communication.agreement import Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.pipeline import Arrival
from bagua_client.layout import Layout, digest_of
from bagua_client.reducer.carrier import Carrier
from bagua_client.torch_private.wrapper import called_untraced

logger = logging.getLogger(__name__)


class ModelWeights:
    """A model's weights; see :class:`bagua_client.algorithms.weights.Weights`.

    Args:
        layout: returns the layout in force.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        algorithm: Algorithm,
        communicator: Communicator,
        layout: Callable[[], Layout],
    ) -> None:
        self.communicator = communicator
        self.parameters = parameters
        self._layout = layout
        self._carrier = Carrier(algorithm, communicator)

    @property
    def whole(self) -> list[list[torch.nn.Parameter]]:
        groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        return list(groups.values())

    @property
    def buckets(self) -> list[list[torch.nn.Parameter]]:
        return [[self.parameters[i] for i in bucket] for bucket in self._layout().partition]

    @property
    def reduces_by_node(self) -> bool:
        configuration = self._layout().configuration
        return self.communicator.ranks_across(configuration) < self.communicator.world_size

    def flat(
        self, parameters: Sequence[torch.nn.Parameter], is_summed: bool = True
    ) -> torch.Tensor:
        elements = sum(parameter.numel() for parameter in parameters)
        missing = -elements % self._carrier.multiple(self._layout().configuration)
        dtype = _wide(parameters[0].dtype) if is_summed else parameters[0].dtype
        flat = parameters[0].new_zeros(elements + missing, dtype=dtype, requires_grad=False)
        torch.cat([p.detach().reshape(-1) for p in parameters], out=flat[:elements])
        return flat

    def carry(self, flat: torch.Tensor) -> Arrival:
        return self._carrier.carry(flat, self._layout().configuration)

    @torch.no_grad()
    def write(self, parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
        for parameter, values in zip(parameters, in_order(parameters)(flat), strict=False):
            parameter.copy_(values)

    def close(self) -> None:
        """Release threads and CUDA streams."""
        self._carrier.close()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of such numbers."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


class Model(Protocol):
    """The model that is trained, and the layout in force."""

    communicator: Communicator
    parameters: list[torch.nn.Parameter]
    layout: Layout


class _Closing:
    """Releases a wrapper's resources once the wrapper is gone; holds no reference to it."""

    def __init__(self, handle: RemovableHandle, weights: ModelWeights) -> None:
        self._handle = handle
        self._weights = weights

    def __call__(self) -> None:
        self._handle.remove()
        self._weights.close()


class Moments:
    """Tells an algorithm when each part of a step begins or ends.

    A step ends when optimizers have stepped all weights after its backward pass. If a weight is
    left out (a gradient scaler skipped its step, for example), the step ends when the next forward
    pass begins. So on every rank a step ends once for every backward pass.
    """

    def __init__(self, algorithm: Algorithm, model: Model, wrapper: torch.nn.Module) -> None:
        models, reference = weakref.ref(model), weakref.ref(self)

        def layout() -> Layout:
            found = models()
            assert found is not None, "weights travel while their model trains"
            return found.layout

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (moments := reference()) is not None:
                moments._optimizer_stepped(optimizer)

        self._algorithm = algorithm
        self._weights = ModelWeights(model.parameters, algorithm, model.communicator, layout)
        self._ours = {id(parameter) for parameter in model.parameters}
        self._missing: set[int] = set()
        # In the order of their first steps, which is the same on all ranks.
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        closing = _Closing(register_optimizer_step_post_hook(called_untraced(hook)), self._weights)
        self._close: Callable[[], object] = weakref.finalize(wrapper, closing)

    def catch_up(self) -> None:
        """The next step's forward pass begins: the step before it has ended on all ranks."""
        if self._missing:
            self._step_ends()

    def forward_begins(self) -> None:
        """A forward pass begins whose gradients would be synchronised; maybe on this rank alone."""
        self._algorithm.forward_begins(self._weights)

    def backward_begins(self) -> None:
        """The first gradients of the step are there."""
        self._algorithm.backward_begins(self._weights)

    def backward_ends(self) -> None:
        """The backward pass is over, and all gradients are final."""
        self._missing = set(self._ours)
        self._algorithm.backward_ends(self._weights)

    def end(self) -> None:
        """End: another algorithm follows. The replicas are equal afterwards. All ranks call this
        together, between two steps."""
        self._algorithm.end()
        found = [optimizer() for optimizer in self._optimizers]
        equalise(self._weights, [optimizer for optimizer in found if optimizer is not None])
        self.close()

    def close(self) -> None:
        """Stop telling the algorithm, and release its threads."""
        self._close()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._missing:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # Compared with those that live: the id of one that is gone comes again.
        is_known = any(known() is optimizer for known in self._optimizers)
        if not is_known and not stepped.isdisjoint(self._ours):
            self._optimizers = [known for known in self._optimizers if known() is not None]
            self._optimizers.append(weakref.ref(optimizer))
        self._missing -= stepped
        if not self._missing:
            self._step_ends()

    def _step_ends(self) -> None:
        self._missing = set()
        self._algorithm.step_ends(self._weights)


@torch.no_grad()
def equalise(weights: ModelWeights, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Set on all ranks the mean of their weights, of the optimizers' state of them, and of the
    gradients: if a momentum or the next update differed, the weights would diverge again. All ranks
    call this together, while no bucket is on its way."""
    communicator = weights.communicator
    kept = [state for optimizer in optimizers for state in _moments_of(optimizer, weights)]
    shapes = [(name, len(tensors), sum(t.numel() for t in tensors)) for name, tensors in kept]
    voters = communicator.group, communicator.device
    if Vote(digest_of(shapes), *voters).dissenters():
        kept = []
        if communicator.rank == 0:
            logger.warning(
                "the optimizers' states differ in shape between ranks, so they are not averaged; "
                "the weights are"
            )
    _average(communicator, [*weights.whole, *(tensors for _, tensors in kept)])
    _average_gradients(weights)


def _average(communicator: Communicator, everything: Sequence[Sequence[torch.Tensor]]) -> None:
    for tensors in everything:
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        flat = flat.to(_wide(flat.dtype))
        dist.all_reduce(flat, group=communicator.group)
        flat.div_(communicator.world_size)
        for tensor, values in zip(tensors, in_order(tensors)(flat), strict=True):
            tensor.copy_(values)


def _average_gradients(weights: ModelWeights) -> None:
    """Average the gradient of each weight that has one on any rank."""
    communicator = weights.communicator
    have = [parameter.grad is not None for parameter in weights.parameters]
    counts = torch.tensor(have, dtype=torch.int64, device=communicator.device)
    dist.all_reduce(counts, group=communicator.group)
    found = {id(p) for p, count in zip(weights.parameters, counts.tolist(), strict=True) if count}
    for parameters in weights.whole:
        used = [parameter for parameter in parameters if id(parameter) in found]
        if not used:
            continue
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in used]
        dense = [g.to_dense() if g.layout is not torch.strided else g for g in gradients]
        _average(communicator, [dense])
        for parameter, gradient, mean in zip(used, gradients, dense, strict=True):
            is_sparse = gradient.layout is torch.sparse_coo
            parameter.grad = mean.to_sparse(gradient.sparse_dim()) if is_sparse else mean


def _moments_of(
    optimizer: torch.optim.Optimizer, weights: ModelWeights
) -> list[tuple[str, list[torch.Tensor]]]:
    """The optimizer's state that has the shape of the weights, such as Adam's ``exp_avg``: for
    each kind of it a name and the tensors, one for each weight that has one."""
    found: dict[str, list[torch.Tensor]] = {}
    places: dict[torch.device, int] = {}
    for parameter in weights.parameters:
        place = places.setdefault(parameter.device, len(places))
        for name, value in sorted(optimizer.state.get(parameter, {}).items()):
            is_beside = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            # Adam's step count, a scalar on the CPU, has the shape of a weight without dimensions.
            if is_beside and value.is_floating_point() and value.device == parameter.device:
                found.setdefault(f"{name} {value.dtype} {place}", []).append(value)
    return list(found.items())
