"""Step times: on the CPU at once, on CUDA when the device has passed the events."""

from __future__ import annotations

import time

import pytest
import torch

from bagua_client.agent.clock import CpuClock, CudaClock, StepTimer, clock_for


def test_on_the_cpu_a_step_is_the_time_between_two_ticks() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    timer = StepTimer(clock)
    timer.tick(1)
    assert timer.drain() == []  # nobody knows when the first step began
    before = time.perf_counter()
    time.sleep(0.02)
    timer.tick(2)
    at_most = time.perf_counter() - before
    ((step, seconds, _),) = timer.drain()
    assert step == 2
    assert 0.02 <= seconds <= at_most + 0.001
    assert timer.drain() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_step_is_known_when_the_device_has_passed_it() -> None:
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    timer = StepTimer(clock)
    timer.tick(1)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    timer.tick(2)
    assert timer.drain() == []
    torch.cuda.synchronize()
    ((step, seconds, _),) = timer.drain()
    assert step == 2
    assert seconds > 0.01
