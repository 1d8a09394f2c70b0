"""The algorithm that keeps a model's replicas together, and the hooks that it needs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from bagua_client.algorithms import Algorithm
from bagua_client.algorithms.base import Declared, LayoutState
from bagua_client.algorithms.companion import in_order
from bagua_client.communication.agreement import Group, Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.pipeline import Arrival
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, digest_of
from bagua_client.reducer.carrier import Carrier, Travel, Watcher
from bagua_client.torch_private.optimizer import at_each_step

# A model's weights as flat tensors, and the moments of a step at which they may travel.

logger = logging.getLogger(__name__)


class ModelWeights:
    """A model's weights; see :class:`bagua_client.algorithms.base.Weights`.

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
    parameters: Sequence[torch.nn.Parameter]
    layout: Layout


class Moments:
    """Tells an algorithm when each part of a step begins or ends.

    A step ends when optimizers have stepped all weights after its backward pass. If a weight is
    left out (a gradient scaler skipped its step, for example), the step ends when the next forward
    pass begins. So on every rank a step ends once for every backward pass.
    """

    def __init__(self, algorithm: Algorithm, model: Model, wrapper: torch.nn.Module) -> None:
        models = weakref.ref(model)

        def layout() -> Layout:
            found = models()
            assert found is not None, "weights travel while their model trains"
            return found.layout

        self._algorithm = algorithm
        weights = ModelWeights(model.parameters, algorithm, model.communicator, layout)
        self._weights = weights
        self._ours = {id(parameter) for parameter in model.parameters}
        self._missing: set[int] = set()
        # In the order of their first steps, which is the same on all ranks.
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        # Last, as an optimizer may step at once in another thread.
        handle = at_each_step(self._optimizer_stepped)

        def close() -> None:  # Holds nothing that holds the wrapper.
            handle.remove()
            weights.close()

        self._close: Callable[[], object] = weakref.finalize(wrapper, close)

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


class Replication:
    """The algorithm of one model. All ranks change it together, between two steps.

    Args:
        declared: the algorithm that the model was wrapped with.
        names: parameter names, by the parameters' ``id``.
        kept_layout: what a checkpoint holds of the buckets.
        watcher: is told of the buckets.

    Attributes:
        declared: the algorithms that may be in force.
        algorithm: the algorithm in force; the instance belongs to this model alone.
        travel: the communication hook that runs the algorithm's chains.
        moments: tells the algorithm when each part of a step begins or ends; None: the algorithm
            does not communicate weights.
    """

    def __init__(
        self,
        declared: Algorithm,
        model: Model,
        names: Mapping[int, str],
        kept_layout: LayoutState,
        wrapper: torch.nn.Module,
        watcher: Watcher,
    ) -> None:
        self._model = model
        self._names = names
        self._kept_layout = kept_layout
        self._wrapper = weakref.ref(wrapper)
        self._communicator = model.communicator
        self.declared = Declared(declared, "replicated", model.parameters, model.communicator)
        self._in_force: str | None = None
        self._phase = 0
        self._left: list[Algorithm] = []
        self.moments: Moments | None = None
        self.algorithm = self._new(Configuration())
        self.travel = Travel(self.algorithm, model.communicator, Configuration(), watcher)

    @property
    def obstacle(self) -> str:
        """Why a job that is wrapped with this algorithm cannot be tuned; empty: it can."""
        return self.declared.own.obstacle

    def choices(self, allowed: Collection[str]) -> list[Algorithm]:
        """The model's own algorithm, then those of ``allowed`` that work on it."""
        own = self._new(Configuration()) if self._in_force else self.algorithm
        return [own, *self.declared.choices(allowed)[1:]]

    def planned(self, configuration: Configuration) -> Algorithm:
        """The algorithm that ``configuration`` would put in force; changes nothing.

        Raises:
            ValueError: there is no such algorithm, or it does not work on this model or under this
                configuration.
        """
        keeps = self.keeps(configuration)
        algorithm = self.algorithm if keeps else self._new(configuration)
        algorithm.check(self._communicator, configuration)
        return algorithm

    def keeps(self, configuration: Configuration) -> bool:
        """Whether the algorithm in force stays under ``configuration``, with its state.

        An algorithm that a configuration names starts anew where its state does not fit. The one
        that the user wrapped the model with never does.
        """
        if configuration.algorithm != self._in_force:
            return False
        try:
            self.algorithm.check(self._communicator, configuration)
        except ValueError:
            return not configuration.algorithm
        return True

    def make_way_for(self, configuration: Configuration) -> None:
        """End the algorithm in force, unless it stays under ``configuration``.

        If it ends, weights that differ between ranks are averaged, with the gradients that the
        optimizers may have yet to use. All ranks call this together, where no bucket is on its way,
        with the same algorithm in force.
        """
        if self.keeps(configuration):
            return
        self._in_force = None
        if self.moments is None:
            self._left.append(self.algorithm)  # The optimizers may have yet to step as it needs.
        else:
            self.moments.end()
            self.moments = None

    def use(self, configuration: Configuration) -> None:
        """Put in force the algorithm that ``configuration`` names. Before the call no algorithm is
        in force, or that one."""
        self.travel.configuration = configuration
        if not self.keeps(configuration):
            self.close()  # Left by an algorithm that failed to begin elsewhere.
            self.algorithm = self.planned(configuration)
            self._in_force = configuration.algorithm
            self._phase = 0
            self.travel.use(self.algorithm)
            if self.algorithm.moves_weights:
                wrapper = self._wrapper()
                assert wrapper is not None, "algorithms change while their model trains"
                self.moments = Moments(self.algorithm, self._model, wrapper)
        self.travel.close()

    def close(self) -> None:
        """Let go of the algorithm in force on this rank, as its ranks are not together any more."""
        if self.moments is not None:
            self.moments.close()
            self.moments = None
        self.travel.close()

    @property
    def awaits_reduction(self) -> bool:
        """Whether an algorithm ends when the next reduction begins."""
        return bool(self._left)

    def reduction_begins(self, group: Group, device: torch.device) -> None:
        """The first bucket of a step is full. All ranks come here, the optimizers have stepped, and
        no bucket is on its way.

        Raises:
            RuntimeError: some rank has not made as many steps as the others.
        """
        while self._left:
            self._left.pop(0).end()
        self.begin_phase(group, device)
        if self.moments is not None:
            self.moments.backward_begins()

    def begin_phase(self, group: Group, device: torch.device) -> None:
        """Begin the algorithm's next phase if it is due, on all ranks in the same step.

        Raises:
            RuntimeError: some rank has not made as many steps as the others.
        """
        phase = self.algorithm.phase
        if phase != self._phase:
            if others := Vote(self.algorithm.progress, group, device).dissenters():
                raise RuntimeError(
                    f"rank {', '.join(map(str, others))} has not made as many steps as the others, "
                    f"as {self.algorithm.name} needs; load the same checkpoint on all ranks"
                )
            self._phase = phase
            self.algorithm.begin(phase)

    def _new(self, configuration: Configuration) -> Algorithm:
        algorithm = self.declared.new(configuration)
        algorithm.names, algorithm.kept_layout = self._names, self._kept_layout
        return algorithm
