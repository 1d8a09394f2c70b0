"""Accelerate, the Trainer of HF transformers, Lightning and Fabric train with ours to the weights
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
from tests.integrations.arms import Arm, needs
from tests.integrations.conftest import Arms

pytestmark = pytest.mark.slow

PACKAGES = {
    "accelerate_loops": ("accelerate",),
    "fabric_loops": ("lightning",),
    "hand_written_loops": (),
    "lightning_fits": ("lightning",),
    "trainer_loops": ("transformers", "accelerate"),
}
BY_HAND = {
    # What a framework does to a wrapper does not depend on how it became ours: each way in turn.
    "accelerate_loops:accumulation": Arm.NAMED,
    "accelerate_loops:bf16": Arm.TUNED,
    "accelerate_loops:hook": Arm.NAMED,
    "accelerate_loops:state": Arm.TUNED,
    "accelerate_loops:second_prepare": Arm.NAMED,
    "accelerate_loops:triggered": Arm.TUNED,
    "fabric_loops:accumulation": Arm.TUNED,
    "fabric_loops:bf16": Arm.NAMED,
    "fabric_loops:state": Arm.TUNED,
    "lightning_fits:fit": Arm.NAMED,
    "lightning_fits:bf16": Arm.NAMED,
    "lightning_fits:resumed": Arm.TUNED,
    "lightning_fits:static_graph": Arm.NAMED,
    "trainer_loops:default": Arm.NAMED,
    "trainer_loops:accumulation": Arm.NAMED,
    "trainer_loops:resumed": Arm.TUNED,
}
TRIED = (
    Configuration(first_bucket_bytes=2**20),
    Configuration(1500, channels=2),
    Configuration(1),
    Configuration(2500, channels=4),
)
FEWEST_TRIED = 2
"""Of these, in the steps that a training has on a busy machine."""
TUNED = (
    ("hand_written_loops:checkpoints", Arm.NAMED, 3),
    ("accelerate_loops:unused_parameters", Arm.NAMED, 5),
    ("trainer_loops:default", Arm.TUNED, 5),
    ("lightning_fits:averaged", Arm.TUNED, 3),
    ("lightning_fits:thawed", Arm.NAMED, 3),
    ("lightning_fits:frozen", Arm.TUNED, 3),
    ("lightning_fits:twice", Arm.NAMED, 3),
    ("lightning_fits:adversaries", Arm.NAMED, 3),
)
LEFT_ALONE = (
    ("accelerate_loops:stateful_hook", Arm.TUNED, False),
    ("lightning_fits:twice_static", Arm.NAMED, False),
    ("lightning_fits:twice_static", Arm.TUNED, True),
)


def case(scenario: str, arm: Arm, *more: object) -> object:
    """Skipped without its framework."""
    named = " ".join(map(str, (scenario, *more, arm.value)))
    marks = needs(*PACKAGES[scenario.partition(":")[0]])
    return pytest.param(arm, scenario, *more, marks=marks, id=named)


@pytest.mark.parametrize(
    ("arm", "scenario"), [case(scenario, arm) for scenario, arm in BY_HAND.items()]
)
def test_buckets_are_recut_by_hand(arms: Arms, arm: Arm, scenario: str) -> None:
    for trained in arms.compare(arm, scenario):
        assert trained.refusals == set()


@pytest.mark.parametrize(("arm", "scenario", "times"), [case(*each) for each in TUNED])
def test_configurations_are_tried(arms: Arms, arm: Arm, scenario: str, times: int) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED]]) as service:
        ranks = arms.compare(arm, scenario, times, service.url, cuts=FEWEST_TRIED)
        assert service.bodies("disagreement") == []
    words = {str(configuration) for configuration in TRIED}
    for trained in ranks:
        assert len(trained.configurations & words) >= FEWEST_TRIED


@pytest.mark.parametrize(("arm", "scenario", "by_hand"), [case(*each) for each in LEFT_ALONE])
def test_what_a_recut_would_spoil_is_left_alone(
    arms: Arms, arm: Arm, scenario: str, by_hand: bool
) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED]]) as service:
        ranks = arms.compare(arm, scenario, 2, "" if by_hand else service.url, cuts=1)
    for trained in ranks:
        assert trained.configurations == {str(TRIED[0])}
        assert bool(trained.refusals) is by_hand
