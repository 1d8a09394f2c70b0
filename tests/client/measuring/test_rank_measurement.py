"""Validations between steps are in no step's time and in no profile."""

from __future__ import annotations

import math
import os
import time
from unittest import mock

import torch

from bagua_client import DistributedDataParallel
from bagua_client.agent import pace
from bagua_client.measuring.clock import CpuClock
from tests.client.agent.scripted_service import ScriptedService
from tests.ranks import RankPool

HOUR_SECONDS = 3600.0
STEPS = 12


class _LateClock:
    """The time, with what is told to have passed."""

    def __init__(self) -> None:
        self.passed_seconds = 0.0

    def mark(self) -> float:
        return time.perf_counter() + self.passed_seconds


def _tune(url: str, validate_every: int) -> None:
    """Train until the tuning has ended, with validations of an hour in between."""
    clock = _LateClock()
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(CpuClock, "mark", clock.mark),
        mock.patch.object(pace, "MOST_SHARE", math.inf),  # The steps are far shorter than usual.
    ):
        model = DistributedDataParallel(torch.nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(3000):
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
            if step % validate_every == 0:
                clock.passed_seconds += HOUR_SECONDS  # After the optimizer's step, it counts, too.
                with model.unmeasured():
                    clock.passed_seconds += HOUR_SECONDS
            if not model.is_tuning:
                break
    assert not model.is_tuning


def _observed(pool: RankPool, validate_every: int) -> tuple[list[float], int]:
    """The times of the steps as the service was told them, and how many profiles it was."""
    with ScriptedService([[{"bucket_bytes": 10**6}, {"bucket_bytes": 64}]], steps=STEPS) as service:
        pool.run(_tune, service.url, validate_every)
        told = service.bodies("observations")
        profiles = service.bodies("profiles")
    assert all(profile["step_seconds"] < HOUR_SECONDS for profile in profiles)
    seconds = [seconds for body in told for step in body["steps"] for seconds in step["seconds"]]
    return seconds, len(profiles)


def test_a_validation_in_each_second_step_is_in_none_of_their_times(two_ranks: RankPool) -> None:
    seconds, profiles = _observed(two_ranks, 2)
    assert len(seconds) >= 2 * STEPS
    assert all(0 < each < HOUR_SECONDS for each in seconds)
    # Another step is recorded in the place of one that a validation came before.
    assert profiles == 2 * 3


def test_a_validation_after_each_step_leaves_steps_to_measure(two_ranks: RankPool) -> None:
    seconds, profiles = _observed(two_ranks, 1)
    assert len(seconds) >= 2 * STEPS
    assert all(0 < each < HOUR_SECONDS for each in seconds)
    assert profiles == 0
