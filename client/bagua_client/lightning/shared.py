"""What the strategies of Trainer and Fabric have in common: the algorithm that one was given, what
takes place between two steps, and what each rank has of its own in a checkpoint."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection

from bagua_client.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    GlobalAlgorithmRegistry,
    QAdamOptimizer,
)
from bagua_client.integrations.distributed_data_parallel import DistributedDataParallel

OPTIMIZER, SCALER = "q_adam_optimizer", "grad_scaler"
"""Arguments of an algorithm that the training has."""
QADAM_MESSAGE = "Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
_SET_BY_LIGHTNING = {"self", "module", "device_ids", "output_device", "kwargs"}
_OF_WRAPPER = {*inspect.signature(DistributedDataParallel).parameters} - {"optimizers", "algorithm"}


class AlgorithmChoice:
    """An algorithm and its arguments.

    Args:
        algorithm: the name of a registered one, or an instance.
        arguments: what it is made with.
        misconfiguration: Lightning's error for a training that does not suit it.

    Attributes:
        needs_optimizer: it is made with the optimizer of the training.

    Raises:
        TypeError: it takes no such argument.
        ValueError: there is no such algorithm, or it takes no such value.
    """

    def __init__(
        self,
        algorithm: str | Algorithm,
        arguments: Mapping[str, Any],
        misconfiguration: type[Exception],
    ) -> None:
        self._algorithm = algorithm
        self._arguments = dict(arguments)
        self._misconfiguration = misconfiguration
        self._takes: frozenset[str] = frozenset()
        if not isinstance(algorithm, Algorithm):
            takes = _parameters(algorithm)
            _check(algorithm, takes, arguments)
            self._takes = frozenset(takes)  # Can be sent to ranks that are spawned.
        elif arguments:
            raise _unknown(
                algorithm.name, arguments, "they belong where the algorithm itself is made"
            )
        self.needs_optimizer = OPTIMIZER in self._takes
        if not self.needs_optimizer:
            self._make((), 0, None)  # What is wrong with a value is said where it is given.

    def wrap(
        self,
        module: torch.nn.Module,
        device_ids: list[int] | None,
        arguments: Mapping[str, Any],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: int,
        precision: object,
    ) -> DistributedDataParallel:
        """``module``, to be trained so.

        Args:
            device_ids, arguments: of DistributedDataParallel.
            optimizers: of the training, where the algorithm needs one.
            schedulers: how many learning rate schedulers the training has.
            precision: Lightning's plugin, which may have a scaler of gradients.

        Raises:
            Exception: Lightning's MisconfigurationException, if that is no training for it.
        """
        algorithm = self._make(optimizers, schedulers, getattr(precision, "scaler", None))
        # As Lightning does: torch's advice for what is captured into a CUDA graph later.
        own = None if device_ids is None else torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(own):
            return DistributedDataParallel(
                module, device_ids=device_ids, algorithm=algorithm, **arguments
            )

    def _make(
        self, optimizers: Sequence[torch.optim.Optimizer], schedulers: int, scaler: object
    ) -> Algorithm:
        if isinstance(self._algorithm, Algorithm):
            return self._algorithm
        arguments = dict(self._arguments)
        if self.needs_optimizer:
            fits = [isinstance(each, QAdamOptimizer) for each in optimizers] == [True]
            if not fits or schedulers > 1:
                raise self._misconfiguration(QADAM_MESSAGE)
            arguments[OPTIMIZER] = optimizers[0]
        if SCALER in self._takes:
            arguments.setdefault(SCALER, scaler)
        return Algorithm.init(self._algorithm, **arguments)


def part(given: Mapping[str, Any], base: Callable[..., None]) -> tuple[dict[str, Any], ...]:
    """Return what of ``given`` is the algorithm's, and what goes on to Lightning's own strategy,
    whose constructor is ``base``: its arguments and those of DistributedDataParallel.
    """
    of_strategy = inspect.signature(base).parameters
    passed_on = {*of_strategy, *_OF_WRAPPER} - _SET_BY_LIGHTNING
    arguments = {name: value for name, value in given.items() if name not in passed_on}
    return arguments, {name: value for name, value in given.items() if name in passed_on}


def _parameters(name: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(GlobalAlgorithmRegistry.get(name)).parameters
    except KeyError as error:
        raise ValueError(error.args[0]) from None


def _check(name: str, takes: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> None:
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    own = [parameter for parameter in takes if parameter != OPTIMIZER]
    unknown = [argument for argument in arguments if argument not in own]
    if OPTIMIZER in takes and OPTIMIZER in unknown:
        raise _unknown(name, [OPTIMIZER], "it is what configure_optimizers returns")
    if unknown:
        raise _unknown(name, unknown, f"it takes {', '.join(own)}" if own else "it takes none")


def _unknown(name: str, arguments: Iterable[str], why: str) -> TypeError:
    return TypeError(
        f"algorithm {name!r} has no argument {', '.join(map(repr, arguments))} here ({why}), nor "
        "has torch's DistributedDataParallel or Lightning's DDPStrategy"
    )


class Interlude:
    """An interlude: while it lasts, time is not a step's, and no round of averaging moves the
    weights.

    Args:
        average: where the ranks train apart, make their weights equal first.
    """

    def __init__(self, average: bool) -> None:
        self._average = average
        self._model: DistributedDataParallel | None = None
        self._unmeasured: AbstractContextManager[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._model is not None

    def begin(self, model: DistributedDataParallel) -> None:
        """Begin, on all ranks after the same step; nothing happens if it has begun."""
        if self._model is not None:
            return
        self._model = model
        unmeasured: AbstractContextManager[None] = model.unmeasured()
        unmeasured.__enter__()
        self._unmeasured = unmeasured
        if isinstance(model.algorithm, AsyncModelAverageAlgorithm):
            model.algorithm.abort(model, average=self._average)

    def end(self) -> None:
        """The next step begins; nothing happens if it is not on."""
        model = self._model
        self.forget()
        if model is not None and isinstance(model.algorithm, AsyncModelAverageAlgorithm):
            model.algorithm.resume(model)

    def forget(self) -> None:
        """Forget the interlude: no step follows. Waits for no other rank."""
        if self._unmeasured is not None:
            self._unmeasured.__exit__(None, None, None)
        self._model = self._unmeasured = None


logger = logging.getLogger(__name__)

CHECKPOINT_KEY = "bagua"
"""Our key in a checkpoint, see :meth:`Kept.collect`."""
LAYOUT = "layout"
"""The key of the layout there, and in an algorithm's state."""


@dataclass(frozen=True)
class Kept:
    """What an algorithm leaves to a checkpoint, on one rank.

    Attributes:
        algorithm: its name.
        layout: the buckets, which are the same on all ranks.
        state: the rank's own, in the memory of the CPU.
        replicas_differ: the ranks' weights and optimizers do.
    """

    algorithm: str
    layout: Mapping[str, Any]
    state: Mapping[str, Any]
    replicas_differ: bool

    @classmethod
    def of(cls, algorithm: Algorithm) -> Kept | None:
        """Return what the algorithm leaves; None, on all ranks: there is nothing to keep."""
        state = algorithm.state_dict()
        layout = state.pop(LAYOUT, {})
        if not (state or layout or algorithm.leaves_gradients):
            return None
        return cls(algorithm.name, layout, _on_cpu(state), algorithm.leaves_gradients)

    @property
    def differs(self) -> bool:
        """Whether each rank has something of its own; the same on all."""
        return bool(self.state) or self.replicas_differ

    def collect(self, replica: Mapping[str, Any]) -> dict[str, Any]:
        """Bring what every rank has to rank 0, one rank after the other. All ranks must call it.

        Args:
            replica: the weights, and what optimizers keep.

        Returns:
            Plain values and tensors, as ``torch.load(weights_only=True)`` wants them: the name of
            the algorithm, the buckets, and by rank its state, if it has one, and, where replicas
            differ, that of each but rank 0, whose the checkpoint has anyway. Of use on rank 0 only.
        """
        kept: dict[str, Any] = {"algorithm": self.algorithm, LAYOUT: self.layout, "ranks": []}
        if not self.differs:
            return kept
        is_first = dist.get_rank() == 0
        own = {"state": self.state, "replica": None}
        if self.replicas_differ and not is_first:
            own["replica"] = _on_cpu(replica)
        ranks: list[Any] = [own]
        if is_first:
            for rank in range(1, dist.get_world_size()):
                received: list[Any] = [None]
                dist.recv_object_list(received, src=rank)
                ranks += received
        else:
            dist.send_object_list(ranks, dst=0)
        return {**kept, "ranks": ranks}


class Resumed(NamedTuple):
    """What a checkpoint has for this rank; without a replica, the checkpoint's own
    weights are it.
    """

    state: Mapping[str, Any]
    replica: Mapping[str, Any] | None


def resumed(saved: Mapping[str, Any] | None, algorithm: Algorithm) -> Resumed | None:
    """Return what :meth:`Kept.collect` gave, for a training that goes on; None, on all ranks: it
    does not fit this one, and the algorithm begins anew at the weights of rank 0.
    """
    now = Kept.of(algorithm)
    if now is None:
        return None
    name, ranks = (saved["algorithm"], saved["ranks"]) if saved else ("", [])
    layout = {LAYOUT: saved[LAYOUT]} if saved and saved[LAYOUT] else {}
    if not now.differs:
        return Resumed(layout, None) if name == algorithm.name else None
    if name == algorithm.name and len(ranks) == dist.get_world_size():
        found = Resumed(**ranks[dist.get_rank()])
        return Resumed({**found.state, **layout}, found.replica)
    if dist.get_rank() == 0:
        was = f"{name} on {len(ranks)} ranks" if ranks else name or "an algorithm without state"
        logger.warning(
            "the checkpoint was made by %s, and this training uses %s on %d ranks: all ranks "
            "continue from the weights of rank 0, and the algorithm starts from the beginning",
            was,
            algorithm.name,
            dist.get_world_size(),
        )
    return None


def _on_cpu(state: Any) -> Any:
    """A copy, which stays as it is while training goes on."""
    return apply_to_collection(state, torch.Tensor, lambda t: t.detach().to("cpu", copy=True))
