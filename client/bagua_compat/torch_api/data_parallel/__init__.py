"""Torch's wrapper as Bagua has it, with its arguments of torch 1.9 and Bagua's; and communication
that gradients flow through."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua_client.algorithms import GradientAllReduceAlgorithm
from bagua_client.integrations import distributed_data_parallel as ours
from bagua_compat.torch_api.bucket import BaguaBucket
from bagua_compat.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel

__all__ = ["DistributedDataParallel", "DistributedDataParallel_V1_9_0", "all_reduce"]


class DistributedDataParallel_V1_9_0(ours.DistributedDataParallel):
    """Ours, tuned under ``BAGUA_AUTOTUNE=1``: has ``module`` trained by all ranks of a process
    group, which must call this together.

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
            warnings.warn("check_reduction does nothing in any torch of today", stacklevel=2)
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


DistributedDataParallel = DistributedDataParallel_V1_9_0


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """``tensor`` reduced over all ranks of ``group`` (None: all of the job); the argument stays as
    it is. Its gradient is that of all ranks' results, reduced in the same way. All ranks must call
    it, and run the backward pass.

    Args:
        op: of ``torch.distributed.ReduceOp``.
    """
    found: torch.Tensor = _AllReduce.apply(op, group, tensor)  # type: ignore[no-untyped-call]
    return found


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> Any:
        ctx.op, ctx.group = op, group
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=op, group=group)
        return reduced

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, all_reduce(gradients[0], ctx.op, ctx.group)
