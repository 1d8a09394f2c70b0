"""A pipeline's stages are models of their own: each is changed by its ranks alone, while the others
compute, and losses and weights stay those of an untouched pipeline."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

import bagua_client
from bagua_client.communication import link
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.sharded.settings import UnitSettings
from bagua_client.sharded.tunable_units import TunableUnits
from tests.client.sharded.models import possible, state_of
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

WIDTH, MICRO_BATCHES, STEPS = 9, 4, 9
TROUBLE_AT, TROUBLED = 6, 3
"""The step before which a change fails, and the rank on which it does."""


class Stage(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        return values * self.gain


def _squares(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().mean()


def _change(place: int, step: int, way: str) -> Mapping[str, Any]:
    """What a stage is changed to before a step: any of what it can have then."""
    chosen = random.Random(100 * place + step)
    found: dict[str, Any] = {
        "channels": chosen.choice((1, 2, 4)),
    }
    if way != "copied" and step > 4:
        found["kept_over_micro_batches"] = chosen.choice(("off", "on"))
    if way == "sharded":
        found["kept_units"] = chosen.randrange(4)
    if step > 3:  # The order in which the units are used is known.
        found["bucket_bytes"] = chosen.choice((360, 800, 5000))
    return found


def _changed(model: Any, change: Mapping[str, Any]) -> bool:
    """Whether all ranks of the stage have agreed on it."""
    tunable = tunable_of(model)
    tunable.attach()  # It looks at all steps.
    return bool(model.reconfigure(replace(tunable.default, **possible(change, tunable))))


def _ranks_of(model: Any) -> tuple[int, ...]:
    return tunable_of(model).communicator.global_ranks


def _failing(method: str) -> AbstractContextManager[Any]:
    """Its first call fails."""
    owner: Any = {"plan": TunableUnits, "put": UnitSettings}[method]
    real, calls = getattr(owner, method), []

    def fail(*args: Any) -> Any:
        calls.append(method)
        if len(calls) == 1:
            raise RuntimeError("no room")
        return real(*args)

    return mock.patch.object(owner, method, fail)


def trained(schedule: str, way: str, ours: bool, trouble: str = "") -> tuple[Any, ...]:
    """The losses that this rank sees, the states of its stages, and how many steps ours has seen.

    Args:
        way: in which stages are sharded; ``kept``: from forward to backward they are not;
            ``copied``: never, as ``replicate`` does it.
        trouble: a method by which one change fails on one rank.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    kind: Any = getattr(schedules, schedule)
    is_looped = issubclass(kind, schedules.PipelineScheduleMulti)
    stages = 4 if is_looped else 2
    models: dict[int, Any] = {}
    for place in range(mesh["pp"].get_local_rank(), stages, 2):
        model: Any = Stage(place)
        for part in (*model.blocks, model):
            if way == "copied":
                replicate_with_fsdp.replicate(part, mesh=mesh["dp"])
            else:
                fully_shard(part, mesh=mesh["dp"], reshard_after_forward=way == "sharded")
        models[place] = bagua_client.tune(model) if ours else model
    made = [
        PipelineStage(model, place, stages, torch.device("cpu"), group=mesh["pp"].get_group())
        for place, model in models.items()
    ]
    pipeline = kind(made if is_looped else made[0], MICRO_BATCHES, loss_fn=_squares)
    parameters = [each for model in models.values() for each in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses: list[float] = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + mesh["dp"].get_local_rank())
        inputs, wanted = torch.randn(2, 2 * MICRO_BATCHES, WIDTH)
        found: list[torch.Tensor] = []
        first = (inputs,) if 0 in models else ()
        last = {"target": wanted, "losses": found} if stages - 1 in models else {}
        is_troubled = step == TROUBLE_AT and dist.get_rank() == TROUBLED
        with _failing(trouble) if trouble and is_troubled else nullcontext():
            for place, model in models.items() if ours and step else ():
                # The ranks of the other stage have not failed.
                fails = trouble == "plan" and step == TROUBLE_AT and TROUBLED in _ranks_of(model)
                assert _changed(model, _change(place, step, way)) != fails
            pipeline.step(*first, **last)
        losses += [loss.item() for loss in found]
        norm: Any = nn.utils.clip_grad_norm_(next(iter(models.values())).parameters(), 0.5)
        losses.append(norm.full_tensor().item())
        optimizer.step()
        optimizer.zero_grad()
    steps = {tunable_of(model)._steps for model in models.values()} if ours else set()
    return losses, [state_of(model) for model in models.values()], steps


def differs(schedule: str, way: str, trouble: str = "") -> str:
    """What differs between an untouched pipeline and ours; empty: nothing."""
    with mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=16, ALIGNED_ELEMENTS=2):
        expected, untouched, _ = trained(schedule, way, ours=False)
        found, changed, steps = trained(schedule, way, ours=True, trouble=trouble)
    if found != expected or steps != {STEPS - 1}:
        return f"{found} instead of {expected}, {steps} steps"
    pairs = [(one, other) for one, other in zip(untouched, changed, strict=True)]
    return ", ".join(n for one, other in pairs for n in one if not torch.equal(one[n], other[n]))


@pytest.mark.parametrize(
    ("schedule", "way"),
    [
        *(("ScheduleGPipe", "sharded"), ("Schedule1F1B", "copied")),
        *(("ScheduleInterleaved1F1B", "sharded"), ("ScheduleInterleavedZeroBubble", "kept")),
    ],
)
def test_stages_are_changed_each_by_itself(four_ranks: RankPool, schedule: str, way: str) -> None:
    assert four_ranks.run(differs, schedule, way) == [""] * 4


@pytest.mark.parametrize("trouble", ["plan", "put"])
def test_where_a_rank_of_a_stage_fails_the_pipeline_goes_on(
    four_ranks: RankPool, trouble: str
) -> None:
    """It cannot carry a change out, as it says in the vote, or while all make it."""
    assert four_ranks.run(differs, "Schedule1F1B", "sharded", trouble) == [""] * 4
