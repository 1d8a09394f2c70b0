"""Lightning and Fabric train with ours to the weights that they train to with torch's class."""

from __future__ import annotations

import pytest

from tests.integrations.arms import OURS, Arm
from tests.integrations.conftest import Arms
from tests.integrations.lacking import needs

pytestmark = [
    pytest.mark.slow,
    needs("lightning"),
    pytest.mark.parametrize("arm", OURS, ids=lambda arm: arm.value),
]

FITS = "fit", "bf16", "resumed", "static_graph"
"""The others are in test_tuned.py, where a service has the buckets cut anew."""


@pytest.mark.parametrize("scenario", FITS)
def test_buckets_of_a_fit_are_recut_by_hand(arms: Arms, arm: Arm, scenario: str) -> None:
    for trained in arms.compare(arm, f"lightning_fits:{scenario}"):
        assert trained.refusals == set()


@pytest.mark.parametrize("scenario", ["accumulation", "bf16", "state"])
def test_buckets_of_a_loop_are_recut_by_hand(arms: Arms, arm: Arm, scenario: str) -> None:
    for trained in arms.compare(arm, f"fabric_loops:{scenario}"):
        assert trained.refusals == set()
