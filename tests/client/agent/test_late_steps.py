"""Steps whose times are known some steps later, as those of GPUs are: none of a trial is lost."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch

from bagua_client import DistributedDataParallel
from bagua_client.measuring.clock import CpuClock
from tests.client.agent.scripted_service import ScriptedService
from tests.ranks import RankPool

STEPS = 2
STEP_SECONDS = 0.01


class _LaggingClock:
    """Knows a mark once the training has made so many steps more."""

    def __init__(self, lag_steps: int) -> None:
        self.step, self._lag_steps = 0, lag_steps
        self._made_in: dict[float, int] = {}

    def mark(self) -> float:
        now = time.perf_counter()
        self._made_in[now] = self.step
        return now

    def is_known(self, mark: float) -> bool:
        return self.step >= self._made_in[mark] + self._lag_steps


def _tune(url: str, lag_steps: int) -> None:
    clock = _LaggingClock(lag_steps)
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(CpuClock, "mark", staticmethod(clock.mark)),
        mock.patch.object(CpuClock, "is_known", lambda _, mark: clock.is_known(mark)),
    ):
        model = DistributedDataParallel(torch.nn.Linear(32, 32))
        while model.is_tuning:
            clock.step += 1
            time.sleep(STEP_SECONDS)
            model(torch.ones(1, 32)).sum().backward()


def _last_steps(service: ScriptedService) -> dict[int, tuple[list[int], int]]:
    """By trial its steps, and the first step under the next one."""
    told: dict[int, list[int]] = {}
    for body in service.bodies("observations"):
        told.setdefault(body["trial"], []).extend(step["step"] for step in body["steps"])
    switched: dict[int, Any] = {b["trial"]: b["step"] for b in service.bodies("switched")}
    return {trial: (told[trial], switched[trial + 1]) for trial in told if trial + 1 in switched}


@pytest.mark.parametrize("lag_steps", [0, 2])
def test_all_steps_of_a_trial_up_to_the_switch_are_told(
    two_ranks: RankPool, lag_steps: int
) -> None:
    sizes = [{"bucket_bytes": 1000 * size} for size in range(1, 7)]
    with ScriptedService([sizes], steps=STEPS) as service:
        two_ranks.run(_tune, service.url, lag_steps)
        found = _last_steps(service)
    assert len(found) == len(sizes) - 1
    for steps, switched in found.values():
        assert steps == list(range(steps[0], steps[-1] + 1))
        # The two steps of the switch are of neither.
        assert steps[-1] == switched - 2
