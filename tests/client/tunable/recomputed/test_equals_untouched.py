"""Losses, states and random numbers are those of an untouched model, bit for bit, however many
blocks are recomputed from one step to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.client.tunable.recomputed.models import BLOCKS, WAYS, Kind, differs
from tests.ranks import RankPool

PLAN: dict[int, dict[str, Any]] = {
    4: {"recomputed_blocks": 1},
    5: {"recomputed_blocks": 0},
    7: {"recomputed_blocks": 2},
    8: {},
    9: {"recomputed_blocks": 0},
}
KINDS = {
    "micro-batches, clipped": Kind(micro_batches=3, clips=True),
    "autocast": Kind(autocast=True),
    "frozen and tied": Kind(frozen=True, tied=True),
    "evaluation in between": Kind(between="evaluation"),
    "static graph": Kind(static_graph=True),
    "compiled inside": Kind(compiles="inside"),
    "compiled around": Kind(compiles="around"),
    "no dropout": Kind("random state lost", dropout=0.0),
}


@pytest.mark.parametrize("ranks", ["replicated", "sharded"])
@pytest.mark.parametrize("way", [w for w in WAYS if w != "random state lost"])
def test_every_way_of_torchs(two_ranks: RankPool, way: str, ranks: str) -> None:
    assert two_ranks.run(differs, Kind(way, ranks), PLAN) == ["", ""]


@pytest.mark.parametrize("ranks", ["replicated", "sharded"])
@pytest.mark.parametrize("way", ["gpt2", "gpt2 reentrant", "llama", "llama reentrant"])
def test_transformers(two_ranks: RankPool, way: str, ranks: str) -> None:
    assert two_ranks.run(differs, Kind(way, ranks), PLAN) == ["", ""]


@pytest.mark.parametrize("ranks", ["replicated", "sharded"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_trainings_do(two_ranks: RankPool, kind: Kind, ranks: str) -> None:
    if ranks == "sharded" and kind.static_graph:
        pytest.skip("DistributedDataParallel's")
    assert two_ranks.run(differs, replace(kind, ranks=ranks), PLAN) == ["", ""]


@settings(max_examples=6)
@given(
    st.dictionaries(
        st.integers(4, 9),
        st.fixed_dictionaries({"recomputed_blocks": st.integers(0, BLOCKS)}),
        min_size=4,
    ),
    st.sampled_from(["replicated", "sharded"]),
)
@pytest.mark.slow
def test_any_sequence(two_ranks: RankPool, plan: dict[int, dict[str, Any]], ranks: str) -> None:
    assert two_ranks.run(differs, Kind(ranks=ranks), plan) == ["", ""]
