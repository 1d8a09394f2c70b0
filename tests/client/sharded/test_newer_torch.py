"""What ``fully_shard`` has since torch 2.15: gradients that are held and reduced otherwise, process
groups, memory and endings of the training's own. Losses and weights stay those of an untouched
model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.client.sharded.models import Kind, differs
from tests.client.sharded.test_equals_stock import COUNTS, DEFERRED, KEPT_ON, SEQUENCE, TOLD
from tests.ranks import RankFailure, RankPool

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
    """Units are kept over micro-batches; torch takes no gradients that wait, so that is refused."""
    kind = replace(BY_HAND, replicas=2, width=8, micro_batches=COUNTS, awaits=awaits, clips=True)
    assert four_ranks.run(differs, kind, KEPT_ON, 12) == [""] * 4
    told = replace(kind, tells="ours", micro_batches=(2,))
    refused = {3: {"deferred_reduction": "copies"}}
    with pytest.raises(RankFailure, match="AssertionError"):
        four_ranks.run(differs, told, refused, 5)
