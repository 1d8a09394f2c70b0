"""The algorithm that keeps a model's replicas together, and the hooks that it needs."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

from bagua_client.algorithms import Algorithm
from bagua_client.algorithms.declared import Declared
from bagua_client.algorithms.weights import KeptLayout
from bagua_client.communication.agreement import Vote
from bagua_client.configuration import Configuration
from bagua_client.reducer.comm_hook import Travel, Watcher
from bagua_client.reducer.weights import Model, Moments


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
        kept_layout: KeptLayout,
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

    def reduction_begins(self, group: dist.ProcessGroup, device: torch.device) -> None:
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

    def begin_phase(self, group: dist.ProcessGroup, device: torch.device) -> None:
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
