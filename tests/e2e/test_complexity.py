"""A real job whose batches differ twentyfold: the service knows its step times closely, by what the
training tells, or by the model's inputs.

What a batch takes passes on the ranks' clocks only, and is so long that no busy machine matters.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bagua_client import DistributedDataParallel
from bagua_client.measuring.clock import CpuClock
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SECONDS_PER_TOKEN = 0.5
SETTINGS = {
    "BAGUA_AUTOTUNE_FRESH": "1",
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "4",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "10000",
}


class _Clock:
    """The time, with what the batches took."""

    def __init__(self) -> None:
        self.passed_seconds = 0.0

    def mark(self) -> float:
        return time.perf_counter() + self.passed_seconds


def _train(tells: bool, grows: bool) -> None:
    """Train until the tuning has ended.

    Args:
        grows: the model's inputs, with their tokens.
    """
    clock, rng = _Clock(), random.Random(dist.get_rank())
    with mock.patch.dict(os.environ, SETTINGS), mock.patch.object(CpuClock, "mark", clock.mark):
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(5000):
            tokens = rng.randrange(20, 400)
            if tells:
                model.report_complexity(tokens)
            clock.passed_seconds += SECONDS_PER_TOKEN * tokens
            model(torch.ones(tokens if grows else 1, 64)).sum().backward()
            optimizer.step()
            if not model.is_tuning:
                break
    assert not model.is_tuning


def _widths(service: ServiceProcess, job: str) -> list[float]:
    """Of the trials' intervals, in parts of a step."""
    trials = service.get(f"jobs/{job}/trials")["trials"]
    return [(t["high"] - t["low"]) / t["seconds"] for t in trials if t["high"] is not None]


def test_the_intervals_of_trials_are_narrower_with_the_complexity(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    pool = tuned_ranks(service.url, (2,))
    for tells, grows in ((False, False), (False, True), (True, True)):
        pool.run(_train, tells, grows, timeout_seconds=180)
    told, seen, unknown = (found["id"] for found in service.get("jobs")["jobs"])
    for job, unit in ((told, 1), (seen, 64)):
        assert median(_widths(service, job)) < 0.1 * median(_widths(service, unknown))
        events = service.get(f"jobs/{job}/events")["events"]
        assert any("corrected to a batch complexity" in event["message"] for event in events)
        steps = service.get(f"jobs/{job}/observations")["observations"]
        assert all(20 * unit <= step["complexity"] < 400 * unit for step in steps)
