"""The clock of a step, where no device is needed."""

from __future__ import annotations

import math
import time

import pytest
import torch

from bagua_client.agent.clock import CpuClock, CudaClock, clock_for


def test_a_step_is_the_time_between_two_ticks() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    clock.tick(1, True)
    before = time.perf_counter()
    time.sleep(0.02)
    clock.tick(2, True)
    at_most = time.perf_counter() - before
    (first, unknown), (second, seconds) = clock.drain()
    assert (first, second) == (1, 2)
    assert math.isnan(unknown)  # nobody knows when the first step began
    assert 0.02 <= seconds <= at_most + 0.001
    assert clock.drain() == []


def test_an_interrupted_step_has_no_time_but_the_next_has() -> None:
    clock = CpuClock()
    clock.tick(1, True)
    clock.tick(2, False)
    clock.tick(3, True)
    times = dict(clock.drain())
    assert math.isnan(times[2])
    assert times[3] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_step_is_known_when_the_device_has_passed_it() -> None:
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    clock.tick(1, True)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    clock.tick(2, True)
    assert clock.drain() == []
    torch.cuda.synchronize()
    ((step, seconds),) = clock.drain()
    assert step == 2
    assert seconds > 0.01
