"""Weights averaged, with all ranks or with one, while the gradients of the step are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms.base import Algorithm, register
from bagua_client.algorithms.weights import Weights
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import AllReduce, Operation
from bagua_client.communication.peers import PeerAverage
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
