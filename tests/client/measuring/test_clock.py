"""Step times: on the CPU at once, on CUDA when the device has passed the events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from unittest import mock

import pytest
import torch

from bagua_client.measuring.clock import (
    MOST_WAITS,
    CpuClock,
    CudaClock,
    StepTime,
    StepTimer,
    clock_for,
)


def test_on_the_cpu_a_step_is_the_time_between_two_ticks() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, CpuClock)
    timer = StepTimer(clock)
    before = time.perf_counter()
    timer.tick(1)
    assert timer.drain() == []  # nobody knows when the first step began
    time.sleep(0.02)
    timer.tick(2)
    at_most = time.perf_counter() - before
    ((step, seconds, *_),) = timer.drain()
    assert step == 2
    assert 0.02 <= seconds <= at_most
    assert timer.drain() == []


class _MadeUpClock(CpuClock):
    """The test's time; what was marked at ``unknown`` the device has not passed yet."""

    def __init__(self) -> None:
        self.now = 0.0
        self.unknown: float | None = None

    def mark(self) -> float:
        return self.now

    def is_known(self, mark: float) -> bool:
        return mark != self.unknown


def _pass(timer: StepTimer, clock: _MadeUpClock, seconds: Sequence[float]) -> None:
    """Compute, wait for others, compute, communicate, which is a wait as well, each for so long."""
    before, waiting, after, communicating = seconds
    clock.now += before
    with timer.waiting():
        clock.now += waiting
    clock.now += after
    timer.computed()
    with timer.waiting():
        clock.now += communicating


def _begun() -> tuple[_MadeUpClock, StepTimer]:
    """The step before the first has ended."""
    timer = StepTimer(clock := _MadeUpClock())
    timer.tick(0)
    return clock, timer


def _step(timer: StepTimer, clock: _MadeUpClock, step: int, seconds: Sequence[float]) -> None:
    _pass(timer, clock, seconds)
    timer.tick(step)


def test_computing_ends_with_the_last_gradient_and_waiting_is_none() -> None:
    clock, timer = _begun()
    _step(timer, clock, 1, (1.0, 4.0, 2.0, 8.0))
    _step(timer, clock, 2, (1.0, 0.0, 1.0, 0.0))
    assert timer.drain() == [StepTime(1, 15.0, 3.0), StepTime(2, 2.0, 2.0)]


def test_a_step_without_a_mark_or_with_one_not_passed_has_no_computing_time() -> None:
    clock, timer = _begun()
    clock.now += 1.0
    timer.tick(1)
    _step(timer, clock, 2, (1.0, 1.0, 1.0, 1.0))
    clock.unknown = 4.0
    assert timer.drain() == [StepTime(1, 1.0, None), StepTime(2, 4.0, None)]


def test_what_follows_the_last_gradient_of_each_pass_of_a_step_is_no_computing() -> None:
    clock, timer = _begun()
    for _ in range(2):
        _pass(timer, clock, (1.0, 1.0, 1.0, 1.0))
        timer.tick_within()
    _pass(timer, clock, (1.0, 1.0, 1.0, 1.0))
    timer.tick(1)
    timer.tick_within()  # Of whose computing nothing was seen.
    _pass(timer, clock, (1.0, 1.0, 1.0, 1.0))
    timer.tick(2)
    _pass(timer, clock, (1.0, 1.0, 1.0, 1.0))
    timer.tick(3)
    assert timer.drain() == [
        StepTime(1, 12.0, 6.0),
        StepTime(2, 4.0, None),
        StepTime(3, 4.0, 2.0),
    ]


def test_passes_without_a_backward_pass_do_not_fill_the_memory() -> None:
    """An evaluation may wait before each of its forward passes, and never communicates."""
    clock = _MadeUpClock()
    with mock.patch.object(clock, "mark", wraps=clock.mark) as mark:
        timer = StepTimer(clock)
    timer.tick(0)
    for _ in range(10 * MOST_WAITS):
        with timer.waiting():
            clock.now += 1.0
    assert mark.call_count <= 2 * MOST_WAITS + 3
    _step(timer, clock, 1, (1.0, 1.0, 1.0, 1.0))
    _step(timer, clock, 2, (1.0, 1.0, 1.0, 1.0))
    assert timer.drain() == [StepTime(1, 10.0 * MOST_WAITS + 4.0, None), StepTime(2, 4.0, 2.0)]


def test_what_is_unmeasured_is_no_part_of_a_step_nor_is_the_time_since_the_optimizer() -> None:
    clock, timer = _begun()
    clock.now += 1.0
    timer.stepped()
    clock.now += 16.0  # workers of a data loader are started, say
    with timer.unmeasured():
        clock.now += 32.0
        with timer.unmeasured():
            clock.now += 64.0
    with timer.unmeasured():
        clock.now += 128.0
    _step(timer, clock, 1, (1.0, 4.0, 2.0, 8.0))
    _step(timer, clock, 2, (1.0, 0.0, 1.0, 0.0))
    assert timer.drain() == [StepTime(1, 16.0, 4.0), StepTime(2, 2.0, 2.0)]


def test_a_step_whose_unmeasured_time_is_not_known_yet_waits() -> None:
    clock, timer = _begun()
    with timer.unmeasured():
        clock.now += 3.0
    _step(timer, clock, 1, (1.0, 0.0, 1.0, 1.0))
    clock.unknown = 3.0
    assert timer.drain() == []
    clock.unknown = None
    assert timer.drain() == [StepTime(1, 3.0, 2.0)]


def test_a_step_that_ends_in_what_is_unmeasured_is_measured() -> None:
    """Whoever trains in there has forgotten to leave it: its time is known all the same."""
    clock, timer = _begun()
    with timer.unmeasured():
        _step(timer, clock, 1, (1.0, 0.0, 1.0, 1.0))
        clock.now += 1.0
    _step(timer, clock, 2, (1.0, 0.0, 1.0, 1.0))
    assert timer.drain() == [StepTime(1, 3.0, 2.0), StepTime(2, 4.0, 3.0)]


def test_what_is_unmeasured_fails_as_ever() -> None:
    clock, timer = _begun()
    with suppress(KeyError), timer.unmeasured():
        clock.now += 3.0
        raise KeyError
    _step(timer, clock, 1, (1.0, 0.0, 1.0, 1.0))
    assert timer.drain() == [StepTime(1, 3.0, 2.0)]


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
    ((step, seconds, *_),) = timer.drain()
    assert step == 2
    assert seconds > 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_computing_is_the_devices_own() -> None:
    timer = StepTimer(clock_for(torch.device("cuda")))
    timer.tick(1)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    timer.computed()
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
    timer.tick(2)
    assert timer.drain() == []
    torch.cuda.synchronize()
    ((_, seconds, compute_seconds, _),) = timer.drain()
    assert compute_seconds is not None
    # The first third, however fast the device's clock is.
    assert 0.01 < compute_seconds < 0.5 * seconds
