"""SyncBatchNorm on the CPU: PyTorch has its layer for accelerators only.

The layer's own autograd function and its collectives run; only the five operations that PyTorch
has as CUDA kernels are computed here. x is (N, C, ...), statistics are (C,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def stand_ins() -> Iterator[tuple[object, str, Callable[..., Any]]]:
    """What has to be replaced where: owner, name, replacement."""
    for kernel in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    ):
        yield torch, kernel.__name__, kernel
    yield torch.nn.SyncBatchNorm, "forward", _on_any_device(torch.nn.SyncBatchNorm.forward)
    # Refuses the layer in a CPU module.
    yield DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda self, module: None


def _on_any_device(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The layer takes CUDA and a few other kinds of device, one of which it asks the name of."""

    def forward_on_any_device(self: torch.nn.SyncBatchNorm, x: Tensor) -> Tensor:
        name = mock.Mock(return_value=x.device.type)
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", name):
            return forward(self, x)

    return forward_on_any_device


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of this rank's x."""
    variance, mean = torch.var_mean(x.double(), _all_but_channels(x), correction=0)
    return mean.float(), (variance + eps).rsqrt().float()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    inverse_deviations: Tensor,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of all ranks' x from what each rank (first dimension) found; updates the running."""
    weights = (counts / counts.sum()).double()[:, None]
    mean = (weights * means).sum(0)
    variances = inverse_deviations.double() ** -2 - eps
    variance = (weights * (variances + (means - mean) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_variance is not None:
        unbiased = variance * (counts.sum() / (counts.sum() - 1))
        running_variance.lerp_(unbiased.to(running_variance.dtype), momentum)
    return mean.float(), (variance + eps).rsqrt().float()


def batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse_deviation: Tensor,
    eps: float,
) -> Tensor:
    """x normalised."""
    y = (x - _along(mean, x)) * _along(inverse_deviation, x)
    if weight is not None:
        y = y * _along(weight, x)
    if bias is not None:
        y = y + _along(bias, x)
    return y.to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    weight: Tensor | None,
    *needed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of dy and of dy (x - mean), and the gradients of weight and bias."""
    dims = _all_but_channels(x)
    sum_dy = dy.double().sum(dims).float()
    sum_dy_xmu = (dy.double() * (x - _along(mean, x))).sum(dims).float()
    dtype = x.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * inverse_deviation).to(dtype), sum_dy.to(dtype)


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse_deviation: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """The gradient of x from sums over all ranks."""
    slope = inverse_deviation**2 * sum_dy_xmu / counts.sum()
    centred = dy - _along(sum_dy / counts.sum(), x)
    dx = (centred - (x - _along(mean, x)) * _along(slope, x)) * _along(inverse_deviation, x)
    if weight is not None:
        dx = dx * _along(weight, x)
    return dx.to(x.dtype)


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(1, -1, *(1 for _ in x.shape[2:]))
