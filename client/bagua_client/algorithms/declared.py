"""The algorithm that a model came with, and those that may take its place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from bagua_client.algorithms.base import Algorithm, GlobalAlgorithmRegistry, offered
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration


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
