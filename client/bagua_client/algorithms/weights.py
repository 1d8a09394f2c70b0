"""What an algorithm sees of the model: its weights, and what a checkpoint holds of its buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from bagua_client.communication.communicator import Communicator
from bagua_client.communication.pipeline import Arrival


class Weights(Protocol):
    """A model's weights as flat tensors, for an algorithm that communicates weights.

    Attributes:
        parameters: the model's parameters.
        communicator: the process groups of the ranks that train the model.
    """

    parameters: Sequence[torch.nn.Parameter]
    communicator: Communicator

    @property
    def whole(self) -> list[list[torch.nn.Parameter]]:
        """All parameters, in one bucket for each dtype and device."""

    @property
    def buckets(self) -> list[list[torch.nn.Parameter]]:
        """All parameters, in the buckets in force."""

    @property
    def reduces_by_node(self) -> bool:
        """Whether each exchange is among one rank of each node, not among all ranks."""

    def flat(
        self, parameters: Sequence[torch.nn.Parameter], is_summed: bool = True
    ) -> torch.Tensor:
        """A flat copy of the values of ``parameters``, padded with zeros to a length that can
        travel.

        Args:
            is_summed: the ranks' will be added up, or scaled before that: of 16-bit numbers as
                float32, else rounding would change replicas that are equal, and a sum overflow.
        """

    def carry(self, flat: torch.Tensor) -> Arrival:
        """Start the algorithm's chain on ``flat``."""

    def write(self, parameters: Sequence[torch.nn.Parameter], flat: torch.Tensor) -> None:
        """Copy the values of ``flat``, which has the layout of :meth:`flat`, to ``parameters``."""


class LayoutState(Protocol):
    """What a checkpoint holds of the buckets."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, the same on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` gave. It is taken up before the first step, if all
        ranks have loaded the same.
        """
