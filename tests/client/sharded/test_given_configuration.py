"""BAGUA_CONFIGURATION: a sharded model trains with what a file says, or as torch has it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import bagua_client
from tests.client.listening import logged
from tests.client.sharded.models import Kind, sharded, state_of, train
from tests.client.sharded.test_tunable_units import MERGES
from tests.ranks import RankPool

ASKED = {"bucket_bytes": 5000, "kept_units": 4, "channels": 2}


def _train(path: str) -> tuple[list[tuple[int, int, int]], bool, list[str]]:
    """What is in force after each step, whether it equals an untouched model, and what is said."""
    kind, seen = Kind(), []
    untouched: Any = sharded(kind)
    expected, optimizer = train(untouched, kind, {}, 1)
    ours: Any = bagua_client.tune(sharded(kind))
    with logged() as lines:
        with mock.patch.dict(os.environ, {"BAGUA_CONFIGURATION": path}):
            found, other = train(ours, kind, {}, 1)
        for _ in range(6):
            expected += train(untouched, kind, {}, 1, optimizer)[0]
            found += train(ours, kind, {}, 1, other)[0]
            now = ours.configuration
            seen.append((now.kept_units, now.channels, now.bucket_bytes))
    one, two = state_of(untouched), state_of(ours)
    are_equal = found == expected and all(one[name].equal(two[name]) for name in one)
    return seen, are_equal, [line for line in lines if line.startswith("BAGUA_CONFIGURATION")]


@MERGES
def test_it_is_in_force_from_the_second_step_and_merges_once_the_order_is_known(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"configuration": ASKED}))
    (seen, are_equal, lines), other = two_ranks.run(_train, str(path))
    assert are_equal
    assert other == (seen, are_equal, [])
    assert seen[0] == (4, 2, 360)
    assert seen[-1] == (4, 2, 5000)
    assert lines == ["BAGUA_CONFIGURATION: bucket 4.88 KiB, 2 channels, 4 units kept (tuned.json)"]


def test_what_the_model_cannot_have_is_said_and_not_used(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"configuration": {"bucket_bytes": 360, "kept_units": 9}}))
    (seen, are_equal, lines), _ = two_ranks.run(_train, str(path))
    assert are_equal
    assert seen[-1] == (0, 1, 360)
    assert "9 units cannot be kept, as only 4 are gathered twice" in lines[0]
