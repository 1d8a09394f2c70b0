"""What a strategy was given: an algorithm with its arguments, and what others take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua_client.algorithms import Algorithm, GlobalAlgorithmRegistry, QAdamOptimizer
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
