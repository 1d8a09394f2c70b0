"""The Trainer of HF transformers, with Accelerate, and Lightning train with ours to the weights
that they train to with torch's class: with buckets that are cut anew by hand, and tuned by a
service, which here tries what a script says, so that all of it is tried whatever it brings.

They wrap, adjust, unwrap and save a model without ever asking us: what of torch's class they rely
on, and ours lacked, would end or change a training that was only meant to become faster. In one
file, as one process runs it: its four ranks import the frameworks once.
"""

from __future__ import annotations

import pytest

from bagua_client import Configuration
from tests.client.agent.scripted_service import ScriptedService
from tests.integrations.arms import Arm
from tests.integrations.conftest import Arms
from tests.integrations.lacking import needs

pytestmark = pytest.mark.slow

PACKAGES = {"lightning_fits": ("lightning",), "trainer_loops": ("transformers", "accelerate")}
BY_HAND = (
    # Each way to become ours; what is done to a wrapper then does not depend on it.
    ("trainer_loops:default", Arm.NAMED),
    ("trainer_loops:resumed", Arm.TUNED),
    ("lightning_fits:fit", Arm.NAMED),
    ("lightning_fits:resumed", Arm.TUNED),
)
TRIED = (
    Configuration(first_bucket_bytes=2**20),
    Configuration(1500, channels=2),
    Configuration(1),
    Configuration(2500, channels=4),
)
FEWEST_TRIED = 2
"""Of these, in the steps that a training has on a busy machine."""
TUNED = (("trainer_loops:default", Arm.TUNED, 5), ("lightning_fits:averaged", Arm.NAMED, 3))


def case(scenario: str, arm: Arm, *more: object) -> object:
    """Skipped without its framework."""
    named = " ".join(map(str, (scenario, *more, arm.value)))
    marks = needs(*PACKAGES[scenario.partition(":")[0]])
    return pytest.param(arm, scenario, *more, marks=marks, id=named)


@pytest.mark.parametrize(
    ("arm", "scenario"),
    [case(*each) for each in BY_HAND],
)
def test_buckets_are_recut_by_hand(arms: Arms, arm: Arm, scenario: str) -> None:
    for trained in arms.compare(arm, scenario):
        assert trained.refusals == set()


@pytest.mark.parametrize(
    ("arm", "scenario", "times"),
    [case(*each) for each in TUNED],
)
def test_configurations_are_tried(arms: Arms, arm: Arm, scenario: str, times: int) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED]]) as service:
        ranks = arms.compare(arm, scenario, times, service.url, cuts=FEWEST_TRIED)
        assert service.bodies("disagreement") == []
    words = {str(configuration) for configuration in TRIED}
    for trained in ranks:
        assert len(trained.configurations & words) >= FEWEST_TRIED
