"""Losses and weights are those of an untouched model, bit for bit, whatever is changed between its
steps, and however it is sharded and trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.sharded.models import Kind, differs
from tests.ranks import RankPool

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        # A block has 360 bytes: alone, two, three, and all in one.
        "bucket_bytes": st.sampled_from([360, 700, 1000, 5000]),
        "kept_units": st.integers(0, 4),
        "channels": st.sampled_from([1, 2, 4]),
        "prefetch": st.integers(0, 3),
        "scatter_group": st.sampled_from(["shared", "own"]),
        "scatter_buffers": st.sampled_from([1, 2, 4]),
    },
)
SEQUENCE: dict[int, dict[str, Any]] = {
    1: {"kept_units": 3},
    3: {"channels": 4, "scatter_group": "own"},
    4: {"bucket_bytes": 700, "kept_units": 3},
    5: {"kept_units": 1, "channels": 2, "prefetch": 2},
    6: {"bucket_bytes": 5000, "channels": 4, "prefetch": 1},
    7: {"kept_units": 4, "scatter_buffers": 4},
    8: {"bucket_bytes": 1000, "kept_units": 4},
    9: {},
}
KINDS = {
    "activation-checkpoints": Kind(checkpoints=True),
    "micro-batches": Kind(micro_batches=3),
    "bfloat16": Kind(param_dtype=torch.bfloat16, clips=True),
    "offloaded": Kind(offloads=True),
    "ignored-and-tied": Kind(ignores=True, tied=True),
    "frozen": Kind(frozen=True),
    "compiled-blocks": Kind(compiles="blocks"),
    "compiled-model": Kind(compiles="model"),
    "all-kept-by-the-user": Kind(user_keeps=True),
    # Weights that were gathered before the optimizer's step are not used after it.
    "evaluation-before-step": Kind(between="evaluation"),
    "dropped-graph": Kind(between="dropped graph"),
    "block-alone": Kind(between="block alone"),
    "no-optimizer": Kind(between="no optimizer"),
}


@settings(max_examples=6)
@given(st.dictionaries(st.integers(3, 9), CHANGES, min_size=4))
def test_any_sequence_of_changes(two_ranks: RankPool, changes: dict[int, dict[str, Any]]) -> None:
    assert two_ranks.run(differs, Kind(), changes) == ["", ""]


def test_copies_of_a_sharded_model(four_ranks: RankPool) -> None:
    assert four_ranks.run(differs, Kind(replicas=2), SEQUENCE) == [""] * 4


@pytest.mark.parametrize("between", ["", "evaluation after step"])
def test_parameters_spread_over_fewer_ranks_after_forward(
    four_ranks: RankPool, between: str
) -> None:
    kind = Kind(ranks_after_forward=2, between=between)
    assert four_ranks.run(differs, kind, SEQUENCE) == [""] * 4


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_ways_to_train(two_ranks: RankPool, kind: Kind) -> None:
    changes = dict(SEQUENCE)
    if kind.user_keeps:
        changes = {1: {"channels": 2}, 4: {"prefetch": 1}}
    assert two_ranks.run(differs, kind, changes) == ["", ""]
