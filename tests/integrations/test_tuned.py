"""What frameworks train while a service tunes them has the weights of torch's class too.

The service here tries what a script says, so that all of it is tried whatever it brings.
"""

from __future__ import annotations

import pytest

from bagua_client import Configuration
from tests.client.agent.scripted_service import ScriptedService
from tests.integrations.arms import OURS, Arm
from tests.integrations.conftest import Arms
from tests.integrations.lacking import needs

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("arm", OURS, ids=lambda arm: arm.value)]

TRIED = (
    Configuration(first_bucket_bytes=2**20),
    Configuration(1500, channels=2),
    Configuration(1),
    Configuration(2500, channels=4),
)
FEWEST_TRIED = 2
"""Of these, in the steps that a training has on a busy machine."""
TUNED = (
    pytest.param("hand_written_loops:checkpoints", 3),
    pytest.param("accelerate_loops:unused_parameters", 5, marks=needs("accelerate")),
    pytest.param("trainer_loops:default", 5, marks=needs("transformers", "accelerate")),
    *(
        pytest.param(f"lightning_fits:{scenario}", 3, marks=needs("lightning"))
        for scenario in ("averaged", "thawed", "frozen", "twice", "adversaries")
    ),
)
LEFT_ALONE = (
    pytest.param("accelerate_loops:stateful_hook", False, marks=needs("accelerate")),
    pytest.param("lightning_fits:twice_static", False, marks=needs("lightning")),
    pytest.param("lightning_fits:twice_static", True, marks=needs("lightning")),
)


@pytest.mark.parametrize(("scenario", "times"), TUNED)
def test_configurations_are_tried(arms: Arms, arm: Arm, scenario: str, times: int) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED]]) as service:
        ranks = arms.compare(arm, scenario, times, service.url, cuts=FEWEST_TRIED)
        assert service.bodies("disagreement") == []
    words = {str(configuration) for configuration in TRIED}
    for trained in ranks:
        assert len(trained.configurations & words) >= FEWEST_TRIED


@pytest.mark.parametrize(("scenario", "by_hand"), LEFT_ALONE)
def test_what_a_recut_would_spoil_is_left_alone(
    arms: Arms, arm: Arm, scenario: str, by_hand: bool
) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED]]) as service:
        ranks = arms.compare(arm, scenario, 2, "" if by_hand else service.url, cuts=1)
    for trained in ranks:
        assert trained.configurations == {str(TRIED[0])}
        assert bool(trained.refusals) is by_hand
