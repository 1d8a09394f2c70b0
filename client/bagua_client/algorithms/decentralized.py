"""Weights averaged, with all ranks or with one, while the gradients of the step are computed; or
their change sent to two neighbours, in eight bits, after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms.base import Algorithm, Weights, register
from bagua_client.algorithms.companion import Companion, in_order
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.compressed_exchange import RingUpdate
from bagua_client.communication.operations import AllReduce, Operation, PeerAverage
from bagua_client.communication.pipeline import Arrival
from bagua_client.configuration import Configuration

MODES = ("all", "shift_one")


@register("decentralized", "weights are averaged, with all ranks or with one other")
class DecentralizedAlgorithm(Algorithm):
    """Decentralized parallel SGD (Lian et al., Can Decentralized Algorithms Outperform Centralized
    Algorithms, NeurIPS 2017). Gradients stay local, as do the buffers. With ``x`` the weights,
    ``p`` the other rank of this step, ``U`` what the optimizer does::

        z = mean of x over all ranks (all), or (x + x of p) / 2 (shift_one)
        g = gradient at x, while z travels
        x = U(z, g)

    Replicas differ between ranks; a checkpoint of rank 0 holds its own.

    Args:
        hierarchical: average inside each node first, then exchange the nodes' means.
        peer_selection_mode: ``shift_one``: rank i of the first half of n meets each of the other
            half in turn.
        communication_interval: weights are exchanged every so many steps, beginning with the first.

    Raises:
        ValueError: another mode, or an interval below 1; or, where a model is wrapped,
            ``shift_one`` with an odd number of ranks (or nodes) to be paired.
    """

    moves_weights = True
    needs_all_ranks = True
    leaves_gradients = True

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        if peer_selection_mode not in MODES:
            raise ValueError(
                f"peer_selection_mode must be one of {', '.join(MODES)}, not "
                f"{peer_selection_mode!r}"
            )
        if communication_interval < 1:
            raise ValueError(
                f"communication_interval must be at least 1, not {communication_interval}"
            )
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval
        self._steps = self._exchanges = 0
        self._in_flight: list[tuple[list[torch.nn.Parameter], torch.Tensor, Arrival]] = []

    def check(self, communicator: Communicator, configuration: Configuration) -> None:
        count = communicator.ranks_across(configuration)
        if self.peer_selection_mode == "all" or count == 1 or count % 2 == 0:
            return
        what = "ranks" if count == communicator.world_size else "nodes"
        raise ValueError(
            f"peer_selection_mode='shift_one' pairs the {what}, and {count} cannot be paired; use "
            f"'all', or hierarchical={what == 'ranks'} if the other number is even"
        )

    def end(self) -> None:
        for _, _, arrival in self._in_flight:  # of a backward pass that broke
            arrival.wait()
        self._in_flight = []

    def backward_begins(self, weights: Weights) -> None:
        if self._steps % self.communication_interval:
            return
        for parameters in weights.whole:
            flat = weights.flat(parameters, self._sums(weights))
            if self.peer_selection_mode == "shift_one" and weights.reduces_by_node:
                flat.div_(weights.communicator.ranks_beside)
            self._in_flight.append((parameters, flat, weights.carry(flat)))

    def _sums(self, weights: Weights) -> bool:
        """Whether weights are added up, or else exchanged in pairs only."""
        return self.peer_selection_mode == "all" or weights.reduces_by_node

    def backward_ends(self, weights: Weights) -> None:
        for parameters, flat, arrival in self._in_flight:
            arrival.wait()
            if self.peer_selection_mode == "all":
                flat.div_(weights.communicator.world_size)
            weights.write(parameters, flat)
        self._exchanges += bool(self._in_flight)
        self._steps += 1
        self._in_flight = []

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        ranks, rank = dist.get_world_size(groups[0]), dist.get_rank(groups[0])
        if self.peer_selection_mode == "all" or ranks == 1:
            return (AllReduce(groups[0]),)
        return PeerAverage(groups[0], peer_of(rank, self._exchanges, ranks)).operations

    def state_dict(self) -> dict[str, Any]:
        own = {"steps": self._steps, "exchanges": self._exchanges}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps, self._exchanges = state["steps"], state["exchanges"]


def peer_of(rank: int, exchange: int, ranks: int) -> int:
    """Whom ``rank`` of an even number of ``ranks`` meets in the exchange of that number: a member
    of the other half, each in turn."""
    half = ranks // 2
    if rank < half:
        return (exchange + rank) % half + half
    return (rank - half - exchange) % half


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
