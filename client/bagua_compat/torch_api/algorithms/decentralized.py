"""Weights averaged with other ranks, whole or in eight bits, as Bagua does it on a single node.

``hierarchical`` averages inside each node first. On a single node that is an average over all its
ranks in Bagua; ours are flat there, as if it was False. And ``bagua_buckets`` shows what Bagua's
buckets do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua_client import algorithms as ours
from bagua_client.algorithms.base import Weights
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.compressed_exchange import RingUpdate
from bagua_client.communication.operations import AllReduce, Operation, Start
from bagua_client.configuration import Configuration
from bagua_compat.torch_api.algorithms.base import Trained
from bagua_compat.torch_api.bucket import BaguaBucket

__all__ = ["DecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithm"]


class DecentralizedAlgorithm(ours.DecentralizedAlgorithm):
    """Ours, with one bucket whose ``_peer_weight`` is the latest average: as many bytes as the
    weights have."""

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(hierarchical, peer_selection_mode, communication_interval)
        self._averages: dict[int, torch.Tensor] = {}

    def check(self, communicator: Communicator, configuration: Configuration) -> None:
        if not _is_one(self, communicator):
            super().check(communicator, configuration)

    def _sums(self, weights: Weights) -> bool:
        return _is_one(self, weights.communicator) or super()._sums(weights)

    def backward_ends(self, weights: Weights) -> None:
        exchanged = [(parameters, flat) for parameters, flat, _ in self._in_flight]
        super().backward_ends(weights)
        if exchanged:
            self._averages = {
                id(parameter): values
                for parameters, flat in exchanged
                for parameter, values in zip(parameters, _parts(parameters, flat), strict=True)
            }

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        if self.peer_selection_mode == "shift_one" and _is_one(self, communicator):
            return _mean(communicator, groups[0])
        return super().exchange(communicator, groups)

    def show(self, ddp: Trained) -> list[BaguaBucket]:
        """Return all parameters in one bucket, the last one first."""
        tensors = [parameter for _, parameter in reversed(ddp.bagua_build_params())]
        latest = [self._averages.get(id(p), p.detach().reshape(-1)) for p in tensors]
        return [_showing(BaguaBucket(tensors, "0", flatten=False), _peer_weight=torch.cat(latest))]


class LowPrecisionDecentralizedAlgorithm(ours.LowPrecisionDecentralizedAlgorithm):
    """Ours, with the replicas in ``_weight``, ``_left_peer_weight`` and ``_right_peer_weight`` of
    the buckets."""

    _alone: dist.ProcessGroup | None = None

    def reify(self, communicator: Communicator) -> ours.Algorithm:
        worker = super().reify(communicator)
        if isinstance(worker, LowPrecisionDecentralizedAlgorithm) and _is_one(self, communicator):
            each = [[rank] for rank in range(communicator.world_size)]
            worker._alone = communicator.new_group(each)
        return worker

    def end(self) -> None:
        if self._alone is not None:
            dist.destroy_process_group(self._alone)
            self._alone = None

    def exchange(
        self, communicator: Communicator, groups: Sequence[dist.ProcessGroup]
    ) -> Sequence[Operation]:
        if self._alone is None:
            return super().exchange(communicator, groups)
        assert self._beside is not None
        # One node on a ring: its own neighbour.
        update = RingUpdate(self._alone, *self._beside)
        return *_mean(communicator, groups[0]), *update.operations

    def show(self, ddp: Trained) -> list[BaguaBucket]:
        """The buckets that are in force."""
        names = "_weight", "_left_peer_weight", "_right_peer_weight"
        replicas = self.state_dict()
        found = []
        for place, tensors in enumerate(ddp.tensors_by_bucket()):
            values = {
                name: torch.cat([_replica(replicas, kind, self.names, t) for t in tensors])
                for name, kind in zip(names, ("own", "left", "right"), strict=True)
            }
            bucket = BaguaBucket(tensors, str(place), flatten=False)
            found.append(_showing(bucket, **values))
        return found


# A tuning knows them by the names of ours.
DecentralizedAlgorithm.name = ours.DecentralizedAlgorithm.name
LowPrecisionDecentralizedAlgorithm.name = ours.LowPrecisionDecentralizedAlgorithm.name


def _is_one(algorithm: ours.Algorithm, communicator: Communicator) -> bool:
    """Whether all ranks are one node, which averages first."""
    return algorithm.hierarchical and len(communicator.topology.nodes) == 1


def _mean(communicator: Communicator, group: dist.ProcessGroup) -> tuple[Operation, Operation]:
    def divide(flat: torch.Tensor) -> None:
        flat.div_(communicator.world_size)

    return AllReduce(group), Start(divide)


def _parts(parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> Sequence[torch.Tensor]:
    sizes = [parameter.numel() for parameter in parameters]
    return torch.split(flat[: sum(sizes)], sizes)


def _replica(
    replicas: dict[str, Any], kind: str, names: Any, parameter: torch.Tensor
) -> torch.Tensor:
    """Return a kept replica; before the first step, the parameter itself."""
    known = replicas.get(kind)
    found: torch.Tensor = parameter.detach() if known is None else known[names[id(parameter)]]
    return found.reshape(-1)


def _showing(bucket: BaguaBucket, **tensors: torch.Tensor) -> BaguaBucket:
    for name, tensor in tensors.items():
        setattr(bucket, name, tensor)
    return bucket
