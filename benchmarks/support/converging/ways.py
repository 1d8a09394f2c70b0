"""The ways to keep a model's replicas, or its parts, together that trainings are compared under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bagua_client import Configuration, DistributedDataParallel, tune
from bagua_client.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    QuantizedAlgorithm,
)

WARM_UP_SHARE = 0.25
"""Of qadam's steps."""
ASYNC_INTERVAL_MS = 100

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Way:
    """How a model's replicas or parts are kept together, by its name on the command line.

    Args:
        steps: of the training.
        rate: factor for its usual learning rate.
    """

    NAMES = (
        "all_reduce",
        "bf16",
        "fp16",
        "bytegrad",
        "bytegrad, error feedback",
        "bytegrad, as Bagua",
        "powersgd",
        "powersgd, rank 4",
        "decentralized",
        "shift_one",
        "low_precision_decentralized",
        "async",
        "adam",
        "qadam",
        "qadam, compatible",
    )
    OF_SHARDS = (
        "all_reduce",
        "bf16",
        "quantized",
        "quantized, error feedback",
        "quantized_weights",
        "quantized_gradients",
    )

    def __init__(self, name: str, steps: int, rate: float) -> None:
        self.name = name
        self.steps = steps
        self.rate = rate

    def begin(
        self, model: nn.Module, usual: Optimizer
    ) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        """The wrapped model, and its optimizer: ``usual`` unless the way has one of its own."""
        make = usual
        if "adam" in self.name:
            share = 2.0 if self.name == "adam" else WARM_UP_SHARE
            make = partial(
                QAdamOptimizer,
                lr=1e-3 * self.rate,
                warmup_steps=max(1, int(share * self.steps)),
                compatible=self.name.endswith("compatible"),
            )
        optimizer = make(model.parameters())
        wrapped = DistributedDataParallel(model, algorithm=self._algorithm(optimizer))
        if self.name in ("bf16", "fp16"):
            assert wrapped.reconfigure(Configuration(wire_precision=self.name))
        return wrapped, optimizer

    def _algorithm(self, optimizer: torch.optim.Optimizer) -> Algorithm:
        if isinstance(optimizer, QAdamOptimizer):
            return QAdamAlgorithm(optimizer)
        name, arguments = self.name, dict[str, Any]()
        if name in ("all_reduce", "bf16", "fp16"):
            name = "gradient_allreduce"
        if name == "bytegrad, error feedback":
            name, arguments = "bytegrad", {"error_feedback": True}
        if name == "bytegrad, as Bagua":
            name, arguments = "bytegrad", {"range_elements": None}
        if name.startswith("powersgd"):
            rank = 4 if name.endswith("4") else 1
            first = self.steps // 10  # Torch's advice.
            arguments = {"matrix_approximation_rank": rank, "start_powerSGD_iter": first}
            name = "powersgd"
        if name == "shift_one":
            name, arguments = "decentralized", {"peer_selection_mode": "shift_one"}
        if name == "async":
            arguments = {"sync_interval_ms": ASYNC_INTERVAL_MS, "warmup_steps": self.steps // 10}
        return Algorithm.init(name, **arguments)

    def begin_sharded(
        self, model: Any, usual: Optimizer, is_narrow: bool = False
    ) -> tuple[Any, torch.optim.Optimizer]:
        """The model, sharded, with a unit for each of its blocks; and its optimizer.

        Args:
            is_narrow: parameters are gathered, and computed with, in bfloat16.
        """
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        policy = policy if is_narrow else MixedPrecisionPolicy()
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        sharded = fully_shard(model, mp_policy=policy)
        tuned: Any = tune(sharded, algorithm=self._of_shards())
        return tuned, usual(tuned.parameters())

    def _of_shards(self) -> str | Algorithm:
        if self.name == "quantized, error feedback":
            return QuantizedAlgorithm(error_feedback=True)
        return "gradient_allreduce" if self.name in ("all_reduce", "bf16") else self.name

    def go_on(self, wrapped: Any) -> None:
        """The first step of a sharded model is made: from now on its settings can change."""
        if self.name == "bf16":
            changed = replace(wrapped.configuration, wire_precision="bf16")
            assert wrapped.reconfigure(changed)

    def end(self, wrapped: DistributedDataParallel) -> None:
        """Replicas that train apart are averaged, as who evaluates them would."""
        if isinstance(wrapped.algorithm, AsyncModelAverageAlgorithm):
            wrapped.algorithm.abort(wrapped, average=True)
        elif self.name in ("decentralized", "shift_one", "low_precision_decentralized"):
            with torch.no_grad():
                for parameter in wrapped.module.parameters():
                    dist.all_reduce(parameter)
                    parameter.div_(dist.get_world_size())
