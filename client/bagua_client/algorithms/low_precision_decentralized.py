"""The change of the weights is sent to two neighbours, in eight bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms.base import Algorithm, register
from bagua_client.algorithms.companion import Companion, in_order
from bagua_client.algorithms.weights import Weights
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.compressed import RingUpdate
from bagua_client.communication.operations import Operation
from bagua_client.configuration import Configuration

REPLICAS = ("own", "left", "right")


@register("low_precision_decentralized", "changes of weights go to two neighbours, in 8 bits")
class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Difference compression (Tang et al., Communication Compression for Decentralized Training,
    NeurIPS 2018, algorithm 1) on a ring. Gradients stay local, as do the buffers. Each rank keeps
    replicas ``W`` of what its neighbours know of its weights, and ``L``, ``R`` of what it knows of
    theirs; with ``x`` the weights after the optimizer's step, ``Q`` there and back in eight bits::

        d = x + L / 3 + R / 3 - 5 / 3 W;   x = W = W + Q(d)

    and the neighbours add ``Q(d)`` to their replicas of this rank. Replicas, 12 bytes a parameter,
    follow every re-cut.

    Args:
        hierarchical: average inside each node first; only its first rank is on the ring.
        communication_interval: weights are exchanged every so many steps, beginning with the first.

    Raises:
        ValueError: an interval below 1.
    """

    moves_weights = True
    needs_all_ranks = True
    leaves_gradients = True

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        if communication_interval < 1:
            raise ValueError(
                f"communication_interval must be at least 1, not {communication_interval}"
            )
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval
        self._steps = 0
        self._is_by_node: bool | None = None
        self._replicas: dict[str, Companion] | None = None
        self._beside: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def check(self, communicator: Communicator, configuration: Configuration) -> None:
        by_node = communicator.ranks_across(configuration) < communicator.world_size
        if self._is_by_node is None:
            self._is_by_node = by_node
        if by_node != self._is_by_node or (by_node and configuration.hierarchical == "shards"):
            way = "'leaders'" if self._is_by_node else "'off'"
            raise ValueError(
                f"{self.name} keeps replicas of other ranks' weights, which hold for "
                f"hierarchical={way} only; it cannot be changed while a model trains"
            )

    def forward_begins(self, weights: Weights) -> None:
        if self._replicas is None:
            # All ranks have the same weights.
            self._replicas = {name: Companion() for name in REPLICAS}
            for companion in self._replicas.values():
                companion.begin_at(weights.parameters)

    def step_ends(self, weights: Weights) -> None:
        self._steps += 1
        if self._replicas is None or (self._steps - 1) % self.communication_interval:
            return
        share = 1.0 / weights.communicator.ranks_beside if weights.reduces_by_node else 1.0
        in_flight = []
        for parameters in weights.buckets:
            flat = weights.flat(parameters).mul_(share)
            self._beside = (
                flat,
                [
                    self._replicas[name].beside(parameters, flat, in_order(parameters))
                    for name in REPLICAS
                ],
            )
            in_flight.append((parameters, flat, weights.carry(flat)))
        for parameters, flat, arrival in in_flight:
            arrival.wait()
            weights.write(parameters, flat)

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        assert self._beside is not None
        return RingUpdate(groups[0], *self._beside).operations

    def state_dict(self) -> dict[str, Any]:
        replicas = self._replicas or {}
        found = {name: companion.state(self.names) for name, companion in replicas.items()}
        return {**super().state_dict(), "steps": self._steps, **found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]
        self._replicas = {name: Companion() for name in REPLICAS} if "own" in state else None
        for name, companion in (self._replicas or {}).items():
            companion.load(state[name], self.names)
