"""A change that one rank cannot make: all ranks go back to what they had, and the training goes on
as if nobody had asked. Later the same change is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bagua_client
from bagua_client.integrations.zero_engine import tunable_of
from bagua_client.zero.buckets import Buckets
from tests.client.zero.models import Kind, engine_of, needs_deepspeed, state_of, train
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, needs_deepspeed]


def _fails_on_rank_1(stage: int) -> str:
    kind = Kind(stage)
    untouched = engine_of(kind)
    expected = train(untouched, kind, {}, 8), state_of(untouched)
    untouched.destroy()
    engine = bagua_client.tune(engine_of(kind))
    tunable = tunable_of(engine)
    smaller = replace(tunable.default, bucket_bytes=4 * 600)
    losses, given = train(engine, kind, {}, 2), tunable.buckets.read()
    failing: Any = mock.patch.object(Buckets, "put", side_effect=[RuntimeError("no room"), None])
    if dist.get_rank() == 1:
        with failing:
            assert not engine.reconfigure(smaller)
    else:
        assert not engine.reconfigure(smaller)
    assert tunable.layout.configuration == tunable.default
    assert tunable.buckets.read() == given
    losses += train(engine, kind, {}, 4, first=2)
    assert engine.reconfigure(smaller)
    assert tunable.buckets.read() == given._replace(bucket=600)
    losses += train(engine, kind, {}, 6, first=4)
    assert engine.reconfigure(tunable.default)
    assert tunable.buckets.read() == given
    losses += train(engine, kind, {}, 8, first=6)
    found = state_of(engine)
    engine.destroy()
    if losses != expected[0]:
        return "other losses"
    return ", ".join(name for name in found if not torch.equal(found[name], expected[1][name]))


@pytest.mark.parametrize("stage", [2, 3])
def test_all_ranks_go_back(two_ranks: RankPool, stage: int) -> None:
    assert two_ranks.run(_fails_on_rank_1, stage) == ["", ""]


def _disagrees() -> tuple[bool, bool]:
    """The ranks are told different things."""
    engine = bagua_client.tune(engine_of(Kind()))
    tunable = tunable_of(engine)
    asked = replace(tunable.default, bucket_bytes=4 * 100 * (1 + dist.get_rank()))
    agreed = engine.reconfigure(asked)
    is_default = tunable.layout_to_come.configuration == tunable.default
    train(engine, Kind(), {}, 2)
    engine.destroy()
    return agreed, is_default


def test_ranks_that_are_told_different_sizes_stay_with_the_default(two_ranks: RankPool) -> None:
    assert two_ranks.run(_disagrees) == [(False, True)] * 2


def _in_the_midst(stage: int) -> list[int]:
    """Asked for between the micro-batches of a step, where a buffer of the old size is in use."""
    kind = Kind(stage, micro_batches=2, zero={"overlap_comm": True})
    engine = bagua_client.tune(engine_of(kind))
    buckets, default = tunable_of(engine).buckets, tunable_of(engine).default
    train(engine, kind, {}, 1)
    found = []
    for part in range(2):
        loss = engine(torch.ones(5, 16)).square().mean()
        engine.backward(loss)
        if part == 0:
            assert engine.reconfigure(replace(default, bucket_bytes=4 * 3000))
            assert engine.configuration.bucket_bytes == 4 * 3000
        found.append(buckets.read().bucket)
        engine.step()
    found.append(buckets.read().bucket)
    train(engine, kind, {}, 2, first=1)
    engine.destroy()
    return found


def test_a_change_in_the_midst_of_a_step_waits_where_it_must(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_in_the_midst, 1):
        assert found == [1500, 1500, 3000]
