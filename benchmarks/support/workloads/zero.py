"""GPT-2 in an engine of DeepSpeed: computes and reduces in bfloat16, ZeRO spreads the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.support.workloads.sharded import MODELS, SAMPLES

ELEMENT_BYTES = 2
"""Of a gradient as it travels."""
SIZES = {"reduce_bucket_size": 500_000_000}
SIZES_OF_STAGE_3 = {"stage3_prefetch_bucket_size": 50_000_000}
"""DeepSpeed's own defaults, in elements."""


def config(stage: int, samples: int = SAMPLES) -> dict[str, Any]:
    """What DeepSpeed's file says, with its default sizes."""
    sizes = {**SIZES, **(SIZES_OF_STAGE_3 if stage == 3 else {})}
    return {
        "train_micro_batch_size_per_gpu": samples,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": True, **sizes},
    }


class ZeroTraining:
    """Trained on random data by torch's AdamW, of which nothing has to be compiled.

    Args:
        config: what DeepSpeed's file says.
    """

    def __init__(self, name: str, device: torch.device, config: Mapping[str, Any]) -> None:
        self._kind, self._device, self._config = MODELS[name], device, config
        self._samples: int = config["train_micro_batch_size_per_gpu"]

    def model(self) -> nn.Module:
        """An engine."""
        deepspeed = _deepspeed_on(self._device)
        torch.manual_seed(0)
        with self._device:
            model = self._kind()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        engine: nn.Module = deepspeed.initialize(
            model=model, optimizer=optimizer, config=dict(self._config)
        )[0]
        return engine

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kind.batch(self._samples, self._device)

    def step(self, engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """One step of the engine; the loss before it."""
        loss: torch.Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        batch = self.batch()

        def step() -> None:
            self.step(wrapped, batch)

        return step


def _deepspeed_on(device: torch.device) -> Any:
    """DeepSpeed, told to use the process group that is there, and to compile nothing."""
    os.environ["DS_ACCELERATOR"] = device.type
    # Its CPU has one device; ranks beyond are of other hosts, as far as it knows.
    os.environ.setdefault("LOCAL_SIZE", str(dist.get_world_size()))
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    # It would look for compilers, and on a CPU make an operation for messages in shared memory.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed
