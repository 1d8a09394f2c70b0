"""A loop as torchtitan writes it: activation checkpoints, compiled blocks, then ``fully_shard``
with precisions and prefetch lists of its own."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import bagua_client
from bagua_client import Configuration
from bagua_client.communication import link
from bagua_client.integrations.sharded_model import tunable_of
from tests.client.agent.scripted_service import ScriptedService
from tests.client.sharded.models import MERGES
from tests.client.sharded.test_checkpoints import difference
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

TOKENS, WIDTH, BLOCKS, MICRO_BATCHES = 32, 8, 4, 2
MOST_STEPS, STEPS_AFTER = 400, 6
DEFAULT = Configuration(1024, recomputed_blocks=4)
"""The embedding has so many bytes, a block more."""
TRIED = (
    DEFAULT,
    replace(DEFAULT, kept_units=3, recomputed_blocks=1, kept_over_micro_batches="on"),
    replace(DEFAULT, bucket_bytes=8192),
    replace(DEFAULT, bucket_bytes=8192, kept_units=5, channels=2, recomputed_blocks=0),
    replace(DEFAULT, channels=4, scatter_group="own"),
    replace(DEFAULT, bucket_bytes=8192, kept_units=5, channels=4, recomputed_blocks=2),
    replace(DEFAULT, bucket_bytes=8192, kept_units=5, kept_over_micro_batches="on"),
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(nn.functional.silu(self.up(self.norm(values))))
        return values + found


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleDict({str(at): Block() for at in range(BLOCKS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            values = layer(values)
        found: torch.Tensor = self.output(self.norm(values))
        return found


def _parallelized() -> Any:
    torch.manual_seed(0)
    model: Any = Transformer()
    for name, block in model.layers.items():
        wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        model.layers[name] = torch.compile(wrapped, backend="eager", fullgraph=True)
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    fully_shard(model.tok_embeddings, **options, reshard_after_forward=True)
    blocks = list(model.layers.values())
    for block in blocks:
        fully_shard(block, **options, reshard_after_forward=True)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other.
    order = [model.tok_embeddings, *blocks, model.norm]
    for one, following in pairwise(order):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    return model


class _Trainer:
    """One model, its optimizer and its schedule."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda at: 0.99**at)

    def step(self, number: int) -> list[float]:
        found = []
        self.optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            is_last = micro == MICRO_BATCHES - 1
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_is_last_backward(is_last)
            seed = 100 * number + 10 * micro + dist.get_rank()
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(TOKENS, (2, 6), generator=generator)
            logits = self.model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / MICRO_BATCHES / dist.get_world_size()).backward()
            found.append(loss.item())
        parameters = [each for each in self.model.parameters() if each.grad is not None]
        norm = nn.utils.get_total_norm([each.grad for each in parameters], foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        self.optimizer.step()
        self.schedule.step()
        if number % 5 == 0:
            self.model.eval()
            with torch.no_grad():
                found.append(self.model(torch.arange(6)[None]).float().sum().item())
            self.model.train()
        return [*found, float(norm)]

    def state(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        # In this order: torch lists no parameters of what an evaluation has left gathered.
        weights = get_model_state_dict(self.model)
        return {**weights, **get_optimizer_state_dict(self.model, self.optimizer, options=options)}


def _values(state: dict[str, Any]) -> dict[str, Any]:
    values = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    return copy.deepcopy(values)


def _trained(url: str) -> tuple[list[str], list[str], str]:
    """What differs from stock; what was in force; how the tuning ended."""
    ours = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}
    torch._dynamo.reset()  # What other tests of this process have compiled counts for its limit.
    small = mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=16, ALIGNED_ELEMENTS=2)
    with small, mock.patch.dict(os.environ, ours):
        stock, tuned = _Trainer(_parallelized()), _Trainer(bagua_client.tune(_parallelized()))
        differing, in_force, left, step = [], [], STEPS_AFTER, 0
        while left and step < MOST_STEPS and not differing:
            expected, found = stock.step(step), tuned.step(step)
            if expected != found:
                differing = [f"step {step}: {found} instead of {expected}"]
            step += 1
            now = str(tunable_of(tuned.model).layout.configuration)
            if now not in in_force:
                in_force.append(now)
                # What a checkpoint has under each configuration.
                differing += difference(_values(stock.state()), _values(tuned.state()))
            left -= tuned.model.tuning.state == "finished"
        differing += difference(_values(stock.state()), _values(tuned.state()))
        return differing, in_force, tuned.model.tuning.state


@MERGES
def test_it_is_tuned_and_trains_as_with_stock(two_ranks: RankPool) -> None:
    with ScriptedService([[each.to_json() for each in (*TRIED, DEFAULT)]]) as service:
        found = two_ranks.run(_trained, service.url)
        assert service.bodies("disagreement") == []
    (differing, in_force, state), other = found
    assert other == (differing, in_force, state)
    assert (differing, state) == ([], "finished")
    assert in_force == [str(each) for each in TRIED]
