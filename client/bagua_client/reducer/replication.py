"""The algorithm that keeps a model's replicas together, and what it needs while it does."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from bagua_client.algorithms import Algorithm, GlobalAlgorithmRegistry, offered
from bagua_client.communication.agreement import Vote
from bagua_client.configuration import Configuration
from bagua_client.reducer.comm_hook import Travel, Watcher
from bagua_client.reducer.weights import Model, Moments


class Replication:
    """Of one model. All ranks change it together, between two steps.

    Args:
        declared: what the model was wrapped with.
        names: of the parameters, by their identities.
        watcher: is told of the buckets.

    Attributes:
        algorithm: what is in force: an instance of this model's own.
        travel: the communication hook that carries out its chains.
        moments: tells it the moments of each step; None: it does not move weights.
    """

    def __init__(
        self,
        declared: Algorithm,
        model: Model,
        names: Mapping[int, str],
        wrapper: torch.nn.Module,
        watcher: Watcher,
    ) -> None:
        self._declared = declared
        self._model = model
        self._names = names
        self._wrapper = weakref.ref(wrapper)
        self._communicator = model.communicator
        self._in_force: str | None = None
        self._phase = 0
        self.moments: Moments | None = None
        self.algorithm = self._new(Configuration())
        self.travel = Travel(self.algorithm, model.communicator, Configuration(), watcher)

    @property
    def obstacle(self) -> str:
        """Why a job that was wrapped so is not tuned; empty: it can be."""
        return self._declared.obstacle

    def named(self, configuration: Configuration) -> Configuration:
        """The same, with the algorithm that the model was wrapped with left out."""
        if configuration.algorithm != self._declared.name:
            return configuration
        return replace(configuration, algorithm="")

    def choices(self, allowed: Collection[str]) -> list[Algorithm]:
        """The algorithms of those names that may be tried here, that of the wrapper first."""
        names = [n for n in GlobalAlgorithmRegistry.available_algorithms() if n in allowed]
        others = [offered(n, self._model.parameters) for n in names if n != self._declared.name]
        return [self._declared, *(each for each in others if each is not None)]

    def planned(self, configuration: Configuration) -> Algorithm:
        """What would be in force under it; changes nothing.

        Raises:
            ValueError: there is no such algorithm here, or it does not work under it.
        """
        keeps = self.keeps(configuration)
        algorithm = self.algorithm if keeps else self._new(configuration)
        algorithm.check(self._communicator, configuration)
        return algorithm

    def keeps(self, configuration: Configuration) -> bool:
        """Whether what is in force stays so, with its state. One that was not chosen by the user
        begins anew where its state does not fit."""
        if configuration.algorithm != self._in_force:
            return False
        try:
            self.algorithm.check(self._communicator, configuration)
        except ValueError:
            return not configuration.algorithm
        return True

    def make_way_for(self, configuration: Configuration) -> None:
        """What is in force ends, unless it stays under ``configuration``: then weights that it has
        moved apart are averaged. All ranks, which have the same in force, between two steps."""
        if self.keeps(configuration):
            return
        self._in_force = None
        if self.moments is None:
            self.algorithm.end()
        else:
            self.moments.end()
            self.moments = None

    def use(self, configuration: Configuration) -> None:
        """Have in force what the configuration names; nothing is in force, or the same."""
        self.travel.configuration = configuration
        if not self.keeps(configuration):
            if self.moments is not None:  # Of one that could not begin on another rank.
                self.moments.close()
                self.moments = None
            self.algorithm = self.planned(configuration)
            self._in_force = configuration.algorithm
            self._phase = 0
            self.travel.use(self.algorithm)
            if self.algorithm.moves_weights:
                wrapper = self._wrapper()
                assert wrapper is not None, "algorithms change while their model trains"
                self.moments = Moments(self.algorithm, self._model, wrapper)
        self.travel.close()

    def change_phase(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Begin the phase that the algorithm has come to, which all ranks find in the same step;
        whether there is a new one."""
        phase = self.algorithm.phase
        if phase == self._phase:
            return False
        if others := Vote(self.algorithm.progress, group, device).dissenters():
            raise RuntimeError(
                f"rank {', '.join(map(str, others))} has not made as many steps as the others, "
                f"as {self.algorithm.name} needs; load the same checkpoint on all ranks"
            )
        self._phase = phase
        self.algorithm.begin(phase)
        return True

    def _new(self, configuration: Configuration) -> Algorithm:
        declared: Algorithm | None = self._declared
        if configuration.algorithm:
            try:
                declared = offered(configuration.algorithm, self._model.parameters)
            except KeyError as error:
                raise ValueError(error.args[0]) from None
        if declared is None:
            raise ValueError(f"{configuration.algorithm} does not work on this model")
        algorithm = declared.reify(self._communicator)
        algorithm.names = self._names
        return algorithm
