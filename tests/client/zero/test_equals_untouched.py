"""Losses, weights and the optimizer's state are those of an untouched engine of DeepSpeed, bit for
bit, whatever is changed between its steps. (On two ranks, whose sums have one order only.)"""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.zero.models import Kind, differs, needs_deepspeed
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, needs_deepspeed]

# A block has 1072 parameters; its largest holds 512, the whole model 4560.
SEQUENCE: dict[int, dict[str, Any]] = {
    1: {"bucket_bytes": 4 * 600},
    2: {"bucket_bytes": 4 * 4560},
    3: {"bucket_bytes": 4 * 100},
    4: {"bucket_bytes": 1},
    5: {},
    6: {"bucket_bytes": 4 * 3000},
}
OF_STAGE_3: dict[int, dict[str, Any]] = {
    1: {"bucket_bytes": 4 * 600},
    2: {"prefetch_bytes": 0},
    3: {"bucket_bytes": 1, "prefetch_bytes": 4 * 4560},
    5: {},
    6: {"bucket_bytes": 4 * 100, "prefetch_bytes": 4 * 100},
}
RECOMPUTED: dict[int, dict[str, Any]] = {
    0: {},
    3: {"recomputed_blocks": 1},
    4: {"recomputed_blocks": 0, "bucket_bytes": 4 * 600},
    5: {},
    6: {"recomputed_blocks": 2, "bucket_bytes": 1},
    7: {"recomputed_blocks": 0},
}
KINDS = {
    "stage-1": Kind(stage=1),
    "stage-1-recomputed": Kind(1, checkpoints=True),
    "stage-1-overlapped-micro-batches": Kind(1, micro_batches=3, zero={"overlap_comm": True}),
    "stage-2": Kind(),
    "overlapped": Kind(zero={"overlap_comm": True}),
    "micro-batches": Kind(micro_batches=3),
    "not-contiguous": Kind(zero={"contiguous_gradients": False}),
    "reduced-to-one-rank": Kind(zero={"use_multi_rank_bucket_allreduce": False}),
    "all-reduced": Kind(zero={"reduce_scatter": False}),
    "round-robin": Kind(zero={"round_robin_gradients": True}),
    "bfloat16": Kind(config={"bf16": {"enabled": True}, "gradient_clipping": 0.5}),
    "stage-2-recomputed-and-frozen": Kind(checkpoints=True, frozen=True),
    "stage-3": Kind(stage=3),
    "stage-3-bfloat16": Kind(3, config={"bf16": {"enabled": True}, "gradient_clipping": 0.5}),
    "stage-3-recomputed": Kind(3, micro_batches=2, checkpoints=True, frozen=True),
}


@pytest.mark.parametrize("name", KINDS)
def test_any_changes(two_ranks: RankPool, name: str) -> None:
    kind = KINDS[name]
    changes = OF_STAGE_3 if kind.stage == 3 else SEQUENCE
    changes = RECOMPUTED if kind.checkpoints else changes
    assert two_ranks.run(differs, kind, changes) == ["", ""]
