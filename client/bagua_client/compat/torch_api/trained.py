"""What an algorithm sees of the module that it trains, and of what trains it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from bagua_client.compat.torch_api.backend import Backend
from bagua_client.compat.torch_api.communication import BaguaProcessGroup
from bagua_client.layout import Partition


class Trained(Protocol):
    """Bagua's ``bagua_ddp``; see
    :class:`bagua_client.compat.torch_api.data_parallel.bagua_distributed.BaguaDistributedDataParallel`.
    """

    module: nn.Module
    bagua_module_name: str
    process_group: BaguaProcessGroup
    gradient_as_bucket_view: bool

    @property
    def _bagua_backend(self) -> Backend:
        """What runs the operations of the module's buckets."""

    @property
    def tuned_partition(self) -> Partition | None:
        """The layout in force; None: the one that the module was wrapped with."""

    def bagua_build_params(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are communicated, with their names."""

    def tensors_by_bucket(self) -> list[list[torch.Tensor]]:
        """The parameters, as the layout in force cuts them."""

    def broadcast_state(self) -> None:
        """Send the first rank's weights, buffers and optimizer states to all."""
