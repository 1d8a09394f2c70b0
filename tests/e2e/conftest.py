"""Services and tuned ranks for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

LIMITS = {
    "BAGUA_AUTOTUNE": "1",
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "7",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.3",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.3",
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """Not started yet."""
    process = ServiceProcess(tmp_path)
    yield process
    process.kill()


@pytest.fixture
def tuned_ranks() -> Iterator[Callable[..., RankPool]]:
    """Makes ranks that tune against a service: 2 nodes x 2, or as told, and with what variables."""
    pools = []

    def make(url: str | None, ranks_per_node: tuple[int, ...] = (2, 2), **more: str) -> RankPool:
        variables = LIMITS | more if url is None else {**LIMITS, "BAGUA_AUTOTUNE_URL": url, **more}
        pools.append(RankPool(ranks_per_node, collective_timeout_seconds=40, variables=variables))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
