"""A training that goes on from a checkpoint takes up its buckets. (That it makes the steps of one
that was never stopped is in every algorithm's contract.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_client.algorithms import ByteGradAlgorithm
from bagua_client.testing.algorithms import Made, Training
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

BYTEGRAD = Made(ByteGradAlgorithm)
SMALL_BYTES = 300


def _loaded_otherwise(rank_without: int | None, options: dict[str, Any]) -> tuple[list[str], int]:
    """The names of the first bucket in the first step of a training that goes on, and the bytes of
    a bucket afterwards."""
    straight = Training(BYTEGRAD)
    for step in range(3):
        straight.step(step)
    assert straight.recut(bucket_bytes=SMALL_BYTES, first_bucket_bytes=0)
    straight.step(3)
    resumed = Training(BYTEGRAD, **options)
    if dist.get_rank() != rank_without:
        resumed.load(straight.save())
    seen: list[str] = []
    algorithm = resumed.model.algorithm
    departs = algorithm.departs

    def look(bucket: Any, wire: torch.Tensor) -> None:
        if not seen:
            seen.extend(algorithm.names[id(parameter)] for parameter in bucket.parameters())
        departs(bucket, wire)

    algorithm.departs = look  # type: ignore[method-assign]
    resumed.step(4)
    return seen, resumed.model.configuration.bucket_bytes


LISTED = ["last.weight", "last.bias", "first.weight", "first.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize(("rank_without", "is_taken"), [(None, True), (1, False), (0, False)])
def test_the_buckets_are_taken_up_if_all_ranks_have_loaded_them(
    two_ranks: RankPool, rank_without: int | None, is_taken: bool
) -> None:
    for first, size_bytes in two_ranks.run(_loaded_otherwise, rank_without, {}):
        assert (first != LISTED) is is_taken
        assert (size_bytes == SMALL_BYTES) is is_taken


def test_a_script_that_asks_for_other_buckets_gets_them_in_the_known_order(
    two_ranks: RankPool,
) -> None:
    for first, size_bytes in two_ranks.run(_loaded_otherwise, None, {"bucket_cap_mb": 1}):
        assert first[0] in ("last.bias", "last.weight")
        assert first != LISTED
        assert size_bytes == 2**20


def _of_another_model() -> bool:
    """Whether it trains, with the buckets of a new training."""
    resumed = Training(BYTEGRAD)
    state = resumed.model.algorithm.state_dict()
    state["layout"]["order"] = ["another.weight"]
    resumed.model.algorithm.load_state_dict(state)
    return resumed.step(0) == Training(BYTEGRAD).step(0)


def test_the_buckets_of_another_model_are_left(two_ranks: RankPool) -> None:
    assert two_ranks.run(_of_another_model) == [True, True]
