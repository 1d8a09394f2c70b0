"""A real job whose batches differ twentyfold: told so, the service knows its step times closely."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
import torch.distributed as dist

from bagua_client import DistributedDataParallel
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

SECONDS_PER_TOKEN = 0.0002


class _Sleeping(torch.nn.Module):
    """Computes for as long as its batch has tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        time.sleep(SECONDS_PER_TOKEN * tokens)
        result: torch.Tensor = self.layers(x).sum()
        return result


def _train(tells: bool) -> int:
    """Train until the tuning has ended; after so many steps."""
    os.environ.update(BAGUA_AUTOTUNE_FRESH="1", BAGUA_AUTOTUNE_MAX_SAMPLES="4")
    model = DistributedDataParallel(_Sleeping())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rng = random.Random(dist.get_rank())
    for step in range(2000):
        tokens = rng.randrange(20, 400)
        if tells:
            model.report_complexity(tokens)
        model(torch.ones(1, 64), tokens).backward()
        optimizer.step()
        if not model.is_tuning:
            return step
    raise AssertionError("still being tuned")


def _widths(service: ServiceProcess, job: str) -> list[float]:
    """Of the trials' intervals, in parts of a step."""
    trials = service.get(f"jobs/{job}/trials")["trials"]
    return [(t["high"] - t["low"]) / t["seconds"] for t in trials if t["high"] is not None]


def test_the_intervals_of_trials_are_narrower_with_the_complexity(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    pool = tuned_ranks(service.url, (2,))
    for tells in (False, True):
        pool.run(_train, tells, timeout_seconds=90)
    job, before = (found["id"] for found in service.get("jobs")["jobs"])
    told, untold = _widths(service, job), _widths(service, before)
    assert len(told) >= 3
    # Twentyfold lengths make far more of a difference than any noise of a busy machine.
    assert median(told) < 0.5 * median(untold)
    events = service.get(f"jobs/{job}/events")["events"]
    assert any("compared as of a complexity" in event["message"] for event in events)
    steps = service.get(f"jobs/{job}/observations")["observations"]
    assert all(20 <= step["complexity"] < 400 for step in steps)
