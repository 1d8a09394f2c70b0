"""What the jobs of the benchmarks train: models that sleep, real ones on GPUs, sharded ones.

A workload is named in a job's specification:

    {"workload": "resnet50", "gradient_bytes": 20000000, "compute_seconds": 0.3, "seed": 0}

On the CPU a published model sleeps instead of computing, but its gradients are real. With
``"device": "cuda"`` it computes, at its full size. With ``"sharding": "fully_shard"`` it computes
on either, and its parameters are spread over the ranks; with ``"copies": 2`` each half of the ranks
has a copy of the model (HSDP). With ``"sharding": "zero"`` DeepSpeed spreads them, or what else
``"deepspeed"`` says, which holds what stands in DeepSpeed's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Training(Protocol):
    """One rank's part of a data-parallel training, for several wrappers side by side."""

    def model(self) -> nn.Module:
        """A replica to be wrapped. Each wrapper needs one of its own, as each hooks into it."""

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        """Makes one step of the wrapped model with each call: gradients are let go of, forward
        and backward pass, and the optimizer's step where there is one."""


def gradient_sizes(model: nn.Module) -> list[int]:
    """Bytes of each parameter's gradient."""
    # Of a parameter that ZeRO's stage 3 has spread nothing is left but what it says itself.
    return [
        getattr(p, "ds_numel", p.numel()) * p.element_size()
        for p in model.parameters()
        if p.requires_grad
    ]


def training(spec: Mapping[str, Any], rank: int, device: torch.device) -> Training:
    """The training that ``spec`` names, on this rank.

    Raises:
        ValueError: there is no such workload on the device.
    """
    name = spec["workload"]
    if spec.get("sharding") == "zero":
        from .sharded import ZeroTraining

        return ZeroTraining(name, device, spec["deepspeed"])
    if spec.get("sharding"):
        from .sharded import ShardedTraining

        named = "samples", "copies", "micro_batches", "recomputes"
        counts = {key: spec[key] for key in named if key in spec}
        return ShardedTraining(name, device, **counts)
    if device.type == "cuda":
        from .computing import ComputingTraining

        return ComputingTraining(name, device)
    from .sleeping import SleepingTraining

    return SleepingTraining(name, spec["gradient_bytes"], spec["compute_seconds"], rank)
