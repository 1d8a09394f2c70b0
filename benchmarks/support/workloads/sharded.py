"""GPT-2, sharded by torch's ``fully_shard``, a unit of each layer and one of what is left; or in an
engine of DeepSpeed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.support.workloads.computing import GPT2XL, GPT2Medium, GPT2Small, GPT2Tiny

MODELS: dict[str, type[GPT2Small]] = {
    "gpt2-tiny": GPT2Tiny,
    "gpt2-small": GPT2Small,
    "gpt2-medium": GPT2Medium,
    "gpt2-xl": GPT2XL,
}
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SAMPLES = 4
"""Of each rank in a step, as many tokens long as the model's context."""


class ShardedTraining:
    """Computes with parameters in bfloat16, reduces gradients in float32; trained on random data.

    Args:
        samples: of each rank in a step; more of them leave less to gain.
        copies: of the model, each spread over as many ranks that follow each other.
        micro_batches: of a step, each with as many samples; gradients of all are reduced. Where
            there are several, the training tells which is the last, as torch's documents advise.
        recomputes: all layers recompute their activations.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        samples: int = SAMPLES,
        copies: int = 1,
        micro_batches: int = 1,
        recomputes: bool = False,
    ) -> None:
        if name not in MODELS:
            raise ValueError(f"no sharded workload {name}; there are {', '.join(MODELS)}")
        self._kind, self._device, self._samples = MODELS[name], device, samples
        self._copies, self._micro_batches = copies, micro_batches
        self._recomputes = recomputes
        self._mesh: DeviceMesh | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self._device:
            model = self._kind()
        if self._copies > 1 and self._mesh is None:  # once, as it makes process groups
            shape = self._copies, dist.get_world_size() // self._copies
            names = "copies", "shards"
            self._mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        layers = model.body.layers
        for place, layer in enumerate(layers):
            if self._recomputes:
                layers[place] = layer = checkpoint_wrapper(layer)
            fully_shard(layer, mp_policy=POLICY, mesh=self._mesh)
        return fully_shard(model, mp_policy=POLICY, mesh=self._mesh)

    def stepper(self, wrapped: nn.Module) -> Callable[[], None]:
        inputs = self._kind.batch(self._samples, self._device)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            for number in range(self._micro_batches):
                if self._micro_batches > 1:
                    wrapped.set_is_last_backward(number == self._micro_batches - 1)  # type: ignore[operator]
                wrapped(*inputs).backward()
            optimizer.step()

        return step


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
    """Computes and reduces in bfloat16, and ZeRO spreads the rest; trained on random data by
    torch's AdamW, of which nothing has to be compiled.

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
