"""What ``fully_shard`` has since torch 2.15: gradients that are held and reduced otherwise, process
groups, memory and endings of the training's own. Losses and weights stay those of an untouched
model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.client.sharded.models import Kind, differs
from tests.client.sharded.test_equals_stock import (
    COUNTS,
    DEFERRED,
    KEPT_ON,
    SEQUENCE,
    TOLD,
    what_is_offered,
)
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
BY_HAND = Kind(ends_itself=True)


@pytest.mark.parametrize("kind", [*KINDS.values(), BY_HAND], ids=[*KINDS, "ended-by-hand"])
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


@pytest.mark.slow
@pytest.mark.parametrize("awaits", ["", "gradient sync"])
def test_passes_ended_by_hand(four_ranks: RankPool, awaits: str) -> None:
    kind = replace(BY_HAND, replicas=2, width=8, micro_batches=COUNTS, awaits=awaits, clips=True)
    assert four_ranks.run(differs, kind, KEPT_ON, 12) == [""] * 4


def test_nothing_waits_for_the_last_where_passes_are_ended_by_hand(two_ranks: RankPool) -> None:
    told = replace(BY_HAND, tells="torch's", micro_batches=(4,))
    for values, why, cannot in two_ranks.run(what_is_offered, told, "deferred_reduction"):
        assert values == ["off"]
        assert "itself ends each backward pass (set_manual_backward_finalization)" in why
        assert cannot
