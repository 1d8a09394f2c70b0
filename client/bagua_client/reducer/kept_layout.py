"""The buckets of a training that stopped, for the one that goes on with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua_client.communication.agreement import Group, Vote
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, digest_of
from bagua_client.reducer.observation import ReadyOrder
from bagua_client.reducer.offer import ReplicatedOffer
from bagua_client.tunable.reconfiguration import Reconfiguration
from bagua_client.tunable.tunable import Tunable

logger = logging.getLogger(__name__)

NOTHING = 0
"""The vote of a rank that has loaded nothing."""


class KeptModel(Tunable, Protocol):
    """A model whose buckets are kept.

    Attributes:
        is_attached: whether a tuning observes the steps.
    """

    is_attached: bool

    @property
    def offer(self) -> ReplicatedOffer: ...

    def cut_in(self, order: Sequence[int], at_once: bool) -> None:
        """Cut in this order, which all ranks know before the first step: now, or as ever later."""


class KeptLayout:
    """What a checkpoint holds of the buckets: numbers that are rounded together, or summed up in
    some order, depend on them.

    A new wrapper does not know the order in which gradients become ready, so its first buckets
    would be others.
    """

    def __init__(self, tunable: KeptModel, order: ReadyOrder) -> None:
        self._tunable = tunable
        self._order = order
        self._loaded: Mapping[str, Any] = {}
        self._is_over = False

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the tensors' names in the order in which gradients become ready
        (empty: it was not seen), whether the next step's buckets are cut in it, what the model was
        wrapped with and the configuration in force. While a tuning chooses that, it is none of the
        training's own.
        """
        tunable = self._tunable
        now = tunable.layout_to_come.configuration
        is_own = not tunable.is_attached and not now.algorithm
        return {
            "order": [tunable.tensors[index].name for index in self._order.learned],
            "is_cut": tunable.is_settled,
            "default": tunable.default.to_json(),
            "configuration": (now if is_own else tunable.default).to_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. It is taken up before the first step, if all
        ranks have loaded the same.
        """
        self._loaded = state

    def take_up(
        self,
        group: Group,
        device: torch.device,
        begin_phase: Callable[[Group, torch.device], None],
    ) -> Layout | None:
        """Train with the buckets that were loaded, if any were. Called before the first step's
        forward pass: all ranks that have loaded some are together there.

        Args:
            begin_phase: has the algorithm begin the phase that it has loaded, if all ranks have:
                else that pass would send the buffers that each rank has of its own.

        Returns:
            The layout to put in force now; None: that of the wrapper.
        """
        if not self._loaded or not self._is_the_same(group, device):
            return None
        begin_phase(group, device)
        state, tunable = self._loaded, self._tunable
        indices = {spec.name: index for index, spec in enumerate(tunable.tensors)}
        order = [indices[name] for name in state["order"] if name in indices]
        if order and len(order) != len(indices):
            self._warn("the checkpoint's buckets do not hold the model's tensors")
            return None
        if order and tunable.offer.in_ready_order:
            tunable.cut_in(order, state["is_cut"])
        asked, default = (Configuration.from_json(state[k]) for k in ("configuration", "default"))
        # What the script, a tuning or a file sets now goes before.
        is_free = not (tunable.is_recut_due or tunable.is_attached)
        if not is_free or not default == tunable.default != asked:
            return None
        return Reconfiguration(tunable, asked, group, device).conclude()

    def reduction_begins(self, group: Group, device: torch.device) -> None:
        """The first bucket of a step is full, on all ranks: those that have loaded nothing say so
        here, as others may wait for them."""
        self._is_the_same(group, device)

    def _is_the_same(self, group: Group, device: torch.device) -> bool:
        """Whether all ranks have loaded the same, which they are asked once."""
        if self._is_over:
            return False
        self._is_over = True
        vote = digest_of(self._loaded) if self._loaded else NOTHING
        votes = Vote(vote, group, device).values()
        if any(votes) and len(set(votes)) > 1:
            self._warn("not all ranks have loaded the same state of the algorithm")
        return len(set(votes)) == 1

    def _warn(self, why: str) -> None:
        if self._tunable.communicator.rank == 0:
            logger.warning("%s; the buckets are cut as for a new training", why)
