"""Algorithms: how the replicas of a model are kept together, or the parts of one. What all of them
have and see of a model, and which of them a model may have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator
from bagua_client.communication.link import Link
from bagua_client.communication.operations import AllReduce, Operation
from bagua_client.communication.pipeline import Arrival
from bagua_client.configuration import Configuration
from bagua_client.torch_private.reducer import GradBucket


class Weights(Protocol):
    """A model's weights as flat tensors, for an algorithm that communicates weights.

    Attributes:
        parameters: the model's parameters.
        communicator: the process groups of the ranks that train the model.
    """

    parameters: Sequence[torch.nn.Parameter]
    communicator: Communicator

    @property
    def whole(self) -> list[list[torch.nn.Parameter]]:
        """All parameters, in one bucket for each dtype and device."""

    @property
    def buckets(self) -> list[list[torch.nn.Parameter]]:
        """All parameters, in the buckets in force."""

    @property
    def reduces_by_node(self) -> bool:
        """Whether each exchange is among one rank of each node, not among all ranks."""

    def flat(
        self, parameters: Sequence[torch.nn.Parameter], is_summed: bool = True
    ) -> torch.Tensor:
        """A flat copy of the values of ``parameters``, padded with zeros to a length that can
        travel.

        Args:
            is_summed: the ranks' will be added up, or scaled before that: of 16-bit numbers as
                float32, else rounding would change replicas that are equal, and a sum overflow.
        """

    def carry(self, flat: torch.Tensor) -> Arrival:
        """Start the algorithm's chain on ``flat``."""

    def write(self, parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
        """Copy the values of ``flat``, which has the layout of :meth:`flat`, to ``parameters``."""


class LayoutState(Protocol):
    """What a checkpoint holds of the buckets."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, the same on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave. It is taken up before the first step, if all
        ranks have loaded the same.
        """


class Algorithm:
    """A way of keeping the replicas together: the chain of operations for each bucket.

    The smallest one, which averages gradients and halves them::

        @register("halved")
        class Halved(Algorithm):
            def scale(self, world_size):
                return 0.5 / world_size

    Attributes:
        name: the name that it is registered under, else the name of its class.
        hierarchical: whether a job begins by reducing inside the nodes first. With one node, or
            one rank on each node, the reduction is flat anyway.
        names: the names of the model's parameters, by ``id(parameter)``.
        kept_layout: the part of :meth:`state_dict` that the buckets are.
        is_torchs: in this phase it does what torch does without it.
        moves_weights: it communicates weights, in the methods below.
        leaves_gradients: in this phase each rank keeps its own gradients and buffers.
        needs_all_ranks: all ranks must train to the end; they cannot end one by one (torch's
            ``join``).
        is_apart: in this phase no rank waits for another; the ranks do not step together.
        obstacle: why a job that was wrapped with it is not tuned; empty: it can be tuned.
        exchanges: how many operations of :meth:`exchange` communicate.
        scales_itself: in this phase the chain scales the gradients, so nothing else does.
        travels_whole: in this phase a bucket is not split into parts that travel at once.
        models: the kinds of models that it is for: ``replicated`` ones (DistributedDataParallel),
            ``sharded`` ones (``fully_shard``), or both. Of a sharded model it has the two methods
            :meth:`gather` and :meth:`reduce`.
        copied_bytes: of a sharded model: so much memory its copies take for each element of what is
            gathered, and of what is reduced.
        kept_bytes: of a sharded model: so much it takes for each element of the whole model.
    """

    name = ""
    hierarchical = False
    names: Mapping[int, str] = MappingProxyType({})
    kept_layout: LayoutState | None = None
    is_torchs = False
    moves_weights = False
    leaves_gradients = False
    needs_all_ranks = False
    is_apart = False
    obstacle = ""
    exchanges = 1
    scales_itself = False
    travels_whole = False
    models: tuple[str, ...] = ("replicated",)
    copied_bytes = 0, 0
    kept_bytes = 0

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    @staticmethod
    def init(name: str, **arguments: Any) -> Algorithm:
        """A new instance of the algorithm registered under ``name``.

        Raises:
            KeyError: there is none.
            TypeError: it takes other arguments.
        """
        return GlobalAlgorithmRegistry.get(name)(**arguments)

    def reify(self, communicator: Communicator) -> Algorithm:
        """The instance for one model, with a state of its own; this one may serve several models.

        Raises:
            ValueError: it does not work for these ranks; the same on all of them.
        """
        return copy.copy(self)

    def check(self, communicator: Communicator, configuration: Configuration) -> None:
        """Whether it works under ``configuration``; the same on all ranks.

        Raises:
            ValueError: it does not.
        """

    @classmethod
    def offered(cls, parameters: Collection[torch.Tensor]) -> Algorithm | None:
        """An instance with the default arguments, which a tuning may try on a model with these
        parameters; None: it does not work for that model."""
        return cls()

    def end(self) -> None:
        """End: another algorithm takes its place. All ranks call this together. It waits for
        communication under way; afterwards weights may differ between ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of the algorithm; each rank has its own. The part
        under ``layout`` is the same on all: the buckets. What a subclass has is added to it.
        """
        return {} if self.kept_layout is None else {"layout": self.kept_layout.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave. The buckets are taken up if all ranks load them
        before the first step.
        """
        if self.kept_layout is not None and "layout" in state:
            self.kept_layout.load_state_dict(state["layout"])

    # The moments of a step; to all but the first all ranks come together, and weights may travel

    def forward_begins(self, weights: Weights) -> None:
        """A pass begins whose gradients would be synchronised. It may be one that only this rank
        makes, and have no backward pass: nothing here may wait for another rank."""

    def backward_begins(self, weights: Weights) -> None:
        """The first gradients are there. Weights may be read, but not changed."""

    def backward_ends(self, weights: Weights) -> None:
        """Called when all gradients are there, and no optimizer has stepped yet."""

    def step_ends(self, weights: Weights) -> None:
        """The optimizers have stepped. Called once for each backward pass, before the next forward
        pass."""

    # What changes by itself

    @property
    def phase(self) -> int:
        """The phase that the algorithm should be in now; 0 if it has none. It is read where the
        first gradients of a step are there. When it changes, the ranks check that it has changed
        on all of them, and :meth:`begin` it together."""
        return 0

    @property
    def progress(self) -> int:
        """A number that must be the same on all ranks when the phase changes."""
        return self.phase

    @property
    def is_warming_up(self) -> bool:
        """Whether another phase is to come, so that steps of now say nothing of those later."""
        return False

    def begin(self, phase: int) -> None:
        """Begin the phase; no bucket is on its way, on any rank."""

    # How a bucket travels

    def scale(self, world_size: int) -> float:
        """The factor of the sum over all ranks: for the average, 1 / world size."""
        return 1.0 / world_size

    def multiple(self, communicator: Communicator, configuration: Configuration) -> int:
        """The number that the elements of what travels must divide by."""
        return 1

    def carries(self, flat: torch.Tensor) -> bool:
        """Whether a bucket of this type travels by :meth:`operations`; else all reduce it."""
        return True

    def reduction_begins(self) -> None:
        """The first bucket of a step is full; none has departed yet."""

    def departs(self, bucket: GradBucket, wire: torch.Tensor) -> None:
        """``bucket`` is full and about to travel as ``wire``: its own buffer or a copy, with what
        is missing to :meth:`multiple` as zeros at the end. It may be changed. Where gradients are
        left it does not travel."""

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        """The chain for a bucket on ``channel``, at least one operation.

        Asked for each bucket of each step, after :meth:`departs`, once for each part of it; they
        come in the same order on all ranks.
        """
        return communicator.sum_operations(
            configuration, channel, lambda group: self.exchange(communicator, group)
        )

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        """Return the operations that leave the sum over the ranks of each of ``groups`` on all of
        them: all ranks, or, where nodes reduce inside first, one of each node. All groups are over
        the same ranks; there are as many as ``exchanges`` says, or one that serves for all.
        """
        return (AllReduce(groups[0]),)

    # How the parts of a sharded model travel

    def gather(self, link: Link, part: torch.Tensor, by_rank: torch.Tensor) -> None:
        """Gather a unit's parameters.

        Args:
            link: between the ranks that hold the parts, or between one rank of each node.
            part: (elements,): this rank's.
            by_rank: (ranks, elements): all ranks' afterwards, the same bits on all ranks.
        """
        link.all_gather(part, by_rank)

    def reduce(
        self, link: Link, by_rank: torch.Tensor, part: torch.Tensor, op: Any, unit: int
    ) -> None:
        """Reduce a unit's gradients, each rank its part of them.

        Args:
            link: as in :meth:`gather`.
            by_rank: (ranks, elements): this rank's gradients of all parts; they may be changed.
            part: (elements,): the ranks' gradients of this rank's part afterwards, reduced.
            op: torch's: a sum, a mean, or a sum of what is scaled.
            unit: the place of the unit in the model.
        """
        link.reduce_scatter(by_rank, part, op)


Declaration = Callable[..., Algorithm]


class Registry:
    """Algorithms by their names.

    Args:
        group: of the entry points by which those of other packages are found. Each names a class,
            or what makes an instance, and is imported when it is asked for.
    """

    def __init__(self, group: str = "") -> None:
        self._group = group
        self._declarations: dict[str, Declaration] = {}
        self._descriptions: dict[str, str] = {}

    def register(self, name: str, algorithm: Declaration, description: str | None = None) -> None:
        """Make ``algorithm``, a class or what makes an instance, known under ``name``.

        Raises:
            TypeError: the name is not a string.
            ValueError: it is taken by another.
        """
        if not isinstance(name, str):
            raise TypeError(f"an algorithm's name must be a string, not {name!r}")
        if self._declarations.setdefault(name, algorithm) is not algorithm:
            raise ValueError(f"there is an algorithm named {name!r} already")
        self._descriptions[name] = description or ""

    def get(self, name: str) -> Declaration:
        """Return what makes an instance.

        Raises:
            KeyError: there is no such algorithm, or it cannot be imported.
        """
        if name not in self._declarations:
            entry = self._of_others().get(name)
            if entry is None:
                known = ", ".join(sorted(self.available_algorithms()))
                raise KeyError(f"there is no algorithm named {name!r}; known are: {known}")
            try:
                found = entry.load()
                self.register(name, found)  # unless it has done so itself
            except Exception as error:
                said = f"the algorithm {name!r} ({entry.value}) cannot be imported: {error!r}"
                raise KeyError(said) from error
            if isinstance(found, type):
                found.name = name  # type: ignore[attr-defined]
        return self._declarations[name]

    def available_algorithms(self, kind: str = "") -> list[str]:
        """Return the names, in the order of their registration; others follow.

        Args:
            kind: only of those for such models, ``replicated`` or ``sharded`` ones; empty: of all.
        """
        names = [*self._declarations, *self._of_others()]
        return [name for name in names if not kind or self.is_for(name, kind)]

    def models(self, name: str) -> tuple[str, ...]:
        """The kinds of models that an algorithm is for.

        Raises:
            KeyError: see :meth:`get`.
        """
        declaration = self.get(name)
        kind = declaration.func if isinstance(declaration, partial) else declaration
        found: tuple[str, ...] = getattr(kind, "models", Algorithm.models)
        return found

    def is_for(self, name: str, kind: str) -> bool:
        """Whether an algorithm is for such models; one that cannot be imported is for none."""
        try:
            return kind in self.models(name)
        except KeyError:
            return False

    def _of_others(self) -> dict[str, EntryPoint]:
        """Those that are not imported yet."""
        found = entry_points(group=self._group) if self._group else ()
        return {entry.name: entry for entry in found if entry.name not in self._declarations}

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self.available_algorithms())}"


GlobalAlgorithmRegistry = Registry("bagua_client.algorithms")


def register(name: str, description: str | None = None) -> Callable[[type], Any]:
    """Make a class of algorithm known under ``name``.

    Raises:
        TypeError, ValueError: see :meth:`Registry.register`.
    """

    def decorate(algorithm: type[Algorithm]) -> type[Algorithm]:
        GlobalAlgorithmRegistry.register(name, algorithm, description)
        algorithm.name = name
        return algorithm

    return decorate


def find(algorithm: str | Algorithm) -> Algorithm:
    """An instance, or a new one of that name.

    Raises:
        ValueError: there is none.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    try:
        return Algorithm.init(algorithm)
    except KeyError as error:
        raise ValueError(error.args[0]) from None


def offered(name: str, parameters: Collection[torch.Tensor]) -> Algorithm | None:
    """Return what a tuning would try under that name; see :meth:`Algorithm.offered`."""
    declaration = GlobalAlgorithmRegistry.get(name)
    make = getattr(declaration, "offered", None)  # A class has it; what makes instances may not.
    found: Algorithm | None = declaration() if make is None else make(parameters)
    return found


class Declared:
    """The algorithms of one model.

    Args:
        own: the algorithm that the model came with.
        kind: of the model: ``replicated`` or ``sharded``.

    Attributes:
        own: see above.
        parameters: of the model.

    Raises:
        ValueError: its algorithm is not for such models.
    """

    def __init__(
        self,
        own: Algorithm,
        kind: str,
        parameters: Sequence[torch.Tensor],
        communicator: Communicator,
    ) -> None:
        self.own = own
        self._kind = kind
        self.parameters = parameters
        self._communicator = communicator
        self._check(own)

    def named(self, configuration: Configuration) -> Configuration:
        """``configuration``, without the algorithm's name if the model came with it."""
        if configuration.algorithm != self.own.name:
            return configuration
        return replace(configuration, algorithm="")

    def choices(self, allowed: Collection[str]) -> list[Algorithm]:
        """The model's own algorithm, then those of ``allowed`` that work on it."""
        registry = GlobalAlgorithmRegistry
        names = [name for name in registry.available_algorithms() if name in allowed]
        possible = [n for n in names if n != self.own.name and registry.is_for(n, self._kind)]
        others = [offered(name, self.parameters) for name in possible]
        return [self.own, *(each for each in others if each is not None)]

    def new(self, configuration: Configuration) -> Algorithm:
        """A new instance of the algorithm that ``configuration`` names, for this model alone.

        Raises:
            ValueError: there is none, or it does not work on this model.
        """
        declared: Algorithm | None = self.own
        if configuration.algorithm:
            try:
                declared = offered(configuration.algorithm, self.parameters)
            except KeyError as error:
                raise ValueError(error.args[0]) from None
        if declared is None:
            raise ValueError(f"{configuration.algorithm} does not work on this model")
        self._check(declared)
        return declared.reify(self._communicator)

    def _check(self, algorithm: Algorithm) -> None:
        if self._kind not in algorithm.models:
            kinds = " and ".join(algorithm.models)
            raise ValueError(
                f"{algorithm.name} is for {kinds} models, and this one is {self._kind}"
            )
