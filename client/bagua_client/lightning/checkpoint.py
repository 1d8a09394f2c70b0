"""Keeps what each rank has of its own in the one file that a checkpoint is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection

from bagua_client.algorithms import Algorithm

logger = logging.getLogger(__name__)

KEY = "bagua"
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


def find(saved: Mapping[str, Any] | None, algorithm: Algorithm) -> Resumed | None:
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
