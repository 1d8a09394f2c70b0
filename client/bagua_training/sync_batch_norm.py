"""Batch normalisation over the batches of all ranks, on GPUs and, unlike torch's, on CPUs.

On GPUs it is torch's own. On CPUs each rank tells the others its number of values, their mean and
their sum of squared deviations (Chan et al., 1979, equation 2.1); backward, two sums travel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm``, whose arguments it takes, also for tensors on the CPU.

    Input is of shape (batch, channels, ...); ranks may have batches of different sizes, also empty
    ones. All ranks of the group must call it together in training.

    Raises:
        ValueError: fewer than two dimensions, or a single value for each channel over all ranks.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the input normalised, in the same shape."""
        in_training = self.training or self.running_mean is None
        is_alone = not dist.is_initialized() or dist.get_world_size(self.process_group) == 1
        if input.device.type != "cpu" or is_alone or not in_training:
            return super().forward(input) if input.device.type != "cpu" else self._local(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        out, mean, variance, count = _Normalised.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.process_group or dist.group.WORLD
        )
        if self.training and self.track_running_stats:
            self._remember(mean, variance, int(count))
        return out  # type: ignore[no-any-return]

    def _local(self, input: Tensor) -> Tensor:
        """Normalise without other ranks: nobody else takes part, or what was learnt is used."""
        plain = nn.modules.batchnorm._BatchNorm.forward
        self._check_input_dim(input)
        return plain(self, input)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Running statistics, as all of torch's batch normalisations keep them."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # the mean of all batches so far
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var), share)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """The module with each of its ``BatchNorm`` layers replaced by this one.

        Weights and statistics are taken over, the same tensors.
        """
        found = module
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, cls):
            found = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            found.weight, found.bias = module.weight, module.bias
            found.running_mean, found.running_var = module.running_mean, module.running_var
            found.num_batches_tracked = module.num_batches_tracked
            found.training = module.training
            if hasattr(module, "qconfig"):
                found.qconfig = module.qconfig
        for name, child in module.named_children():
            found.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return found


class _Normalised(torch.autograd.Function):
    """Ioffe and Szegedy, 2015, algorithm 1, over all ranks of a group."""

    @staticmethod
    def forward(
        context: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _statistics(input, group)
        if count <= 1:
            raise ValueError(
                "the ranks together have a single value for each channel, and need several; this "
                f"rank's input has the shape {tuple(input.shape)}"
            )
        inverse = (variance + eps).rsqrt().to(input.dtype)
        normalised = (input - _wide(mean.to(input.dtype), input)) * _wide(inverse, input)
        context.save_for_backward(normalised, weight, inverse)
        context.group, context.count = group, count
        out = normalised if weight is None else normalised * _wide(weight, input)
        out = out if bias is None else out + _wide(bias, input)
        count_tensor = torch.tensor(count)
        context.mark_non_differentiable(mean, variance, count_tensor)
        return out, mean, variance, count_tensor

    @staticmethod
    def backward(context: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        normalised, weight, inverse = context.saved_tensors
        others = [dimension for dimension in range(gradient.ndim) if dimension != 1]
        sums = torch.stack([gradient.sum(others), (gradient * normalised).sum(others)])
        of_weight = sums[1].clone() if weight is not None else None
        of_bias = sums[0].clone() if context.needs_input_grad[2] else None
        of_input = None
        if context.needs_input_grad[0]:
            dist.all_reduce(sums, group=context.group)
            means = sums / context.count
            of_input = gradient - _wide(means[0], gradient)
            of_input -= normalised * _wide(means[1], gradient)
            of_input *= _wide(inverse if weight is None else inverse * weight, gradient)
        return of_input, of_weight, of_bias, None, None


def _statistics(input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, int]:
    """Return for each channel, over all ranks: mean and variance (biased) in float64, number of
    values.
    """
    channels = input.shape[1]
    values = input.detach().transpose(0, 1).reshape(channels, -1).double()
    count = values.shape[1]
    mean = values.mean(1) if count else torch.zeros(channels, dtype=torch.float64)
    squares = (values - mean[:, None]).square().sum(1)
    own = torch.cat([torch.tensor([count], dtype=torch.float64), mean, squares])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    counts, means, sums = torch.split(torch.stack(everyone), [1, channels, channels], 1)
    total = counts.sum().clamp(min=1)
    mean = (counts * means).sum(0) / total
    deviations = sums.sum(0) + (counts * (means - mean).square()).sum(0)
    return mean, deviations / total, int(counts.sum())


def _wide(of_channels: Tensor, like: Tensor) -> Tensor:
    """Shape (channels,) to one that broadcasts over (batch, channels, ...)."""
    return of_channels.view(1, -1, *[1] * (like.ndim - 2))
