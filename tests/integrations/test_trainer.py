"""The Trainer of HF transformers trains with ours to the weights of torch's class."""

from __future__ import annotations

import pytest

from tests.integrations.arms import OURS, Arm
from tests.integrations.conftest import Arms
from tests.integrations.lacking import needs

pytestmark = [
    pytest.mark.slow,
    needs("transformers", "accelerate"),
    pytest.mark.parametrize("arm", OURS, ids=lambda arm: arm.value),
]


@pytest.mark.parametrize("scenario", ["default", "accumulation", "resumed"])
def test_buckets_are_recut_by_hand(arms: Arms, arm: Arm, scenario: str) -> None:
    for trained in arms.compare(arm, f"trainer_loops:{scenario}"):
        assert trained.refusals == set()
