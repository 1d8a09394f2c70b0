"""Accelerate trains with ours to the weights that it trains to with torch's class.

It wraps, adjusts, unwraps and saves a model without ever asking us: what of torch's class it
relies on, and ours lacked, would end or change a training that was only meant to become faster.
"""

from __future__ import annotations

import pytest

from tests.integrations.arms import OURS, Arm
from tests.integrations.conftest import Arms
from tests.integrations.lacking import needs

pytestmark = [
    pytest.mark.slow,
    needs("accelerate"),
    pytest.mark.parametrize("arm", OURS, ids=lambda arm: arm.value),
]

SCENARIOS = (
    "accumulation",
    "bf16",
    "hook",
    "state",
    "second_prepare",
    "triggered",
)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_buckets_are_recut_by_hand(arms: Arms, arm: Arm, scenario: str) -> None:
    for trained in arms.compare(arm, f"accelerate_loops:{scenario}"):
        assert trained.refusals == set()
