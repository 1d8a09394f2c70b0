"""Torch's wrapper as Bagua has it: its arguments of torch 1.9, and Bagua's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bagua_client.algorithms import GradientAllReduceAlgorithm
from bagua_client.compat.torch_api.bucket import BaguaBucket
from bagua_client.compat.torch_api.data_parallel.bagua_distributed import (
    BaguaDistributedDataParallel,
)
from bagua_client.integrations import distributed_data_parallel as ours


class DistributedDataParallel_V1_9_0(ours.DistributedDataParallel):
    """Ours, tuned under ``BAGUA_AUTOTUNE=1``. It takes the arguments of
    :func:`DistributedDataParallel`.

    Attributes:
        inner: what Bagua's algorithms are given.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Any = None,
    ) -> None:
        is_on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())

        def wrap(wrapped: nn.Module, **options: Any) -> ours.DistributedDataParallel:
            super(DistributedDataParallel_V1_9_0, self).__init__(
                wrapped,
                # Torch takes neither for a module on the CPU.
                device_ids=None if is_on_cpu else device_ids,
                output_device=None if is_on_cpu else output_device,
                dim=dim,
                bucket_cap_mb=bucket_cap_mb,
                **options,
            )
            self.broadcast_buffers = broadcast_buffers
            return self

        if check_reduction:
            warnings.warn("check_reduction does nothing in any torch of today", stacklevel=3)
        inner = BaguaDistributedDataParallel(
            module,
            optimizers,
            GradientAllReduceAlgorithm() if algorithm is None else algorithm,
            process_group,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            wrap=wrap,
        )
        self.inner = inner

    @property
    def bagua_algorithm(self) -> Any:
        """The algorithm's instance for this module."""
        return self.inner.bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that were given."""
        return self.inner.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[BaguaBucket]:
        """The buckets, as they are cut now."""
        return self.inner.bagua_buckets


def DistributedDataParallel(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None = None,
    output_device: int | torch.device | None = None,
    dim: int = 0,
    broadcast_buffers: bool = True,
    process_group: Any = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = True,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    algorithm: Any = None,
) -> DistributedDataParallel_V1_9_0:
    """Have ``module`` trained by all ranks of a process group, which must call this together.

    Bagua hands a model over to torch, without its algorithm, where ``device_ids``,
    ``output_device``, ``dim``, ``broadcast_buffers=False`` or ``check_reduction`` is given. Here
    they mean what they do in torch, and the algorithm stays.

    Args:
        module, device_ids, output_device, dim, broadcast_buffers, bucket_cap_mb,
            find_unused_parameters, gradient_as_bucket_view: as torch's. Bagua takes no notice of
            ``bucket_cap_mb``; here a tuning starts from it.
        process_group: Bagua's or torch's; None: of all ranks.
        check_reduction: does nothing, as in torch.
        optimizers: of the module.
        algorithm: see ``with_bagua``; None: gradients are averaged.

    Raises:
        ValueError: the algorithm does not work for these ranks; or torch's.
    """
    arguments = dict(locals())
    return DistributedDataParallel_V1_9_0(**arguments)
