"""Our algorithms for replicated models keep what every one must."""

from __future__ import annotations

from functools import partial

import pytest

from bagua_client.algorithms import (
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from bagua_client.testing.algorithms import AlgorithmContract, Made
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

ADAM = partial(QAdamOptimizer, lr=0.01, warmup_steps=2)
OURS = {
    "gradient_allreduce": partial(GradientAllReduceAlgorithm, hierarchical=True),
    "bytegrad": partial(ByteGradAlgorithm, error_feedback=True),
    "powersgd": partial(PowerSGDAlgorithm, start_powerSGD_iter=2, hierarchical=True),
    "powersgd, cold": partial(PowerSGDAlgorithm, 2, 0, warm_start=False),
    "decentralized": DecentralizedAlgorithm,
    "shift_one": partial(DecentralizedAlgorithm, False, "shift_one", 2),
    "low_precision": LowPrecisionDecentralizedAlgorithm,
    "async": partial(AsyncModelAverageAlgorithm, sync_interval_ms=1),
    "qadam": QAdamAlgorithm,
}


class TestOurs(AlgorithmContract):
    @pytest.fixture
    def ranks(self, four_ranks: RankPool) -> RankPool:
        return four_ranks

    @pytest.fixture
    def two_ranks(self, two_ranks: RankPool) -> RankPool:
        return two_ranks

    @pytest.fixture
    def one_rank(self, one_rank: RankPool) -> RankPool:
        return one_rank

    @pytest.fixture(params=OURS)
    def made(self, request: pytest.FixtureRequest) -> Made:
        algorithm = OURS[request.param]
        if algorithm is QAdamAlgorithm:
            return Made(algorithm, ADAM, of_optimizer=True)
        return Made(algorithm)
