"""What ``fully_shard`` has since torch 2.15: gradients that are held and reduced otherwise, process
groups, memory and endings of the training's own. Losses and weights stay those of an untouched
model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import bagua_client
from bagua_client.integrations.sharded_model import tunable_of
from tests.client.sharded.models import WIDTH, Kind, differs, sharded, state_of
from tests.client.sharded.test_equals_stock import DEFERRED, KEPT_ON, SEQUENCE, TOLD
from tests.ranks import RankPool

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15"
)

ROUGH = Kind(param_dtype=torch.bfloat16, reduce_dtype=None, clips=True)
KINDS = {
    "gradients-as-weights": ROUGH,
    "exact-gain": replace(ROUGH, has="exact gain"),
    "any-gradient": Kind(has="any gradient"),
    "own-scatter-group": Kind(has="own scatter group"),
    "kept-storage": Kind(has="kept storage"),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_ways_to_train(two_ranks: RankPool, kind: Kind) -> None:
    assert two_ranks.run(differs, kind, SEQUENCE) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_micro_batches(two_ranks: RankPool, kind: Kind) -> None:
    own = replace(kind, micro_batches=TOLD.micro_batches, clips=True)
    assert two_ranks.run(differs, replace(own, awaits=""), KEPT_ON, 12) == ["", ""]
    by_hand = replace(own, awaits_from=3)
    told = replace(own, awaits="", tells="ours")
    assert two_ranks.run(differs, told, DEFERRED, 12, by_hand) == ["", ""]


def _ended_by_hand() -> list[str]:
    """What differs from a model that torch ends the passes of."""
    models: list[Any] = [sharded(Kind()), bagua_client.tune(sharded(Kind()))]
    models[1].set_manual_backward_finalization(True)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            model(torch.full((2, WIDTH), float(step))).square().mean().backward()
            if model is models[1]:
                model.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"itself ends .*\(set_manual_backward_finalization\)"):
        tunable_of(models[1])
    one, other = map(state_of, models)
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_a_training_that_ends_its_backward_passes_is_left_alone(two_ranks: RankPool) -> None:
    assert two_ranks.run(_ended_by_hand) == [[], []]
