"""The ranks of the client's tests, and one alone; the asserts of contracts tell values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.client.conftest import four_ranks, two_ranks  # noqa: F401

from tests.ranks import RankPool

pytest.register_assert_rewrite(
    "bagua_autotune.testing", "bagua_client.testing.algorithms", "bagua_client.testing.tunables"
)


@pytest.fixture(scope="session")
def one_rank() -> Iterator[RankPool]:
    pool = RankPool([1])
    yield pool
    pool.close()
