"""What the ranks of a link get is what numpy says, whatever divides by nothing."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_client.communication import link
from bagua_client.communication.link import Link
from tests.ranks import RankPool

DTYPES = ("float32", "bfloat16", "uint8")
_made: dict[tuple[int, int], Any] = {}


def groups_of(ranks: int, stripes: int) -> list[Any]:
    """Process groups over the first ``ranks`` of four; called on all four."""
    return [
        _made.get((ranks, at)) or _made.setdefault((ranks, at), dist.new_group(range(ranks)))
        for at in range(stripes)
    ]


def numbers(elements: int, dtype: str, rank: int) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in each type."""
    drawn = np.random.default_rng(rank).integers(0, 16, elements)
    return torch.from_numpy(drawn).to(getattr(torch, dtype))


def _exchanged(ranks: int, stripes: int, elements: int, dtype: str) -> list[Any] | None:
    groups, rank = groups_of(ranks, stripes), dist.get_rank()
    if rank >= ranks:
        return None
    with mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=8, ALIGNED_ELEMENTS=2):
        between = Link(groups)
        own = numbers(ranks * elements, dtype, rank).view(ranks, elements)
        gathered = torch.empty_like(own)
        between.all_gather(own[0].clone(), gathered)
        swapped = between.all_to_all(own.clone())
        reduced = torch.empty_like(own[0])
        between.reduce_scatter(own.clone(), reduced, dist.ReduceOp.SUM)
    return [each.double().tolist() for each in (gathered, swapped, reduced)]


@settings(max_examples=12)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 70), st.sampled_from(DTYPES))
@pytest.mark.slow
def test_each_exchange_is_numpys(
    four_ranks: RankPool, ranks: int, stripes: int, elements: int, dtype: str
) -> None:
    found = four_ranks.run(_exchanged, ranks, stripes, elements, dtype)
    whole = np.stack(
        [
            numbers(ranks * elements, dtype, rank).double().numpy().reshape(ranks, elements)
            for rank in range(ranks)
        ]
    )
    for rank in range(ranks):
        gathered, swapped, reduced = found[rank]
        assert np.array_equal(gathered, whole[:, 0])
        assert np.array_equal(swapped, whole[:, rank])
        assert np.array_equal(reduced, whole[:, rank].sum(axis=0))
