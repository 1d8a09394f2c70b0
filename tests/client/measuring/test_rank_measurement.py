"""What a rank tells of its steps: validations between them are in no time and in no profile, and
what the training says of its batches reaches the service.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import bagua_client
from bagua_client import DistributedDataParallel
from bagua_client.agent import report
from bagua_client.measuring.clock import CpuClock
from bagua_client.measuring.rank_measurement import BatchComplexity
from bagua_client.tunable.passes import elements_in
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


Step = Callable[[Any, torch.optim.Optimizer, int], object]
"""Of a model and its optimizer; the number is the step's."""


def until_tuned(
    url: str, step: Step, module: torch.nn.Module | None = None, **options: Any
) -> DistributedDataParallel:
    """A model that was trained until its tuning had ended."""
    with mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}):
        model = DistributedDataParallel(module or torch.nn.Linear(32, 32), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for number in range(3000):
            step(model, optimizer, number)
            optimizer.zero_grad()
            if not model.is_tuning:
                break
    assert not model.is_tuning
    return model


def _tune(url: str, validate_every: int) -> None:
    """With validations of an hour in between."""
    clock = _LateClock()

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        if number % validate_every == 0:
            clock.passed_seconds += HOUR_SECONDS  # After the optimizer's step, it counts, too.
            with model.unmeasured():
                clock.passed_seconds += HOUR_SECONDS

    quick = mock.patch.object(report, "MOST_SHARE", math.inf)  # The steps are shorter than usual.
    with mock.patch.object(CpuClock, "mark", clock.mark), quick:
        until_tuned(url, step)


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


MICRO_BATCHES = 12
"""So many that the ranks can report, vote and switch in one step."""


def _tune_micro_batches(url: str, slow_bytes: int, last_step: float = math.inf) -> None:
    """Each micro-batch takes an hour where buckets have so many bytes.

    Args:
        last_step: of the optimizer, which is there on.
    """
    clock = _LateClock()

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(MICRO_BATCHES):
            is_slow = model.configuration.bucket_bytes == slow_bytes
            clock.passed_seconds += HOUR_SECONDS if is_slow else 0.0
            model(torch.ones(1, 32)).sum().backward()
        if number < last_step:
            optimizer.step()

    with mock.patch.object(CpuClock, "mark", clock.mark):
        until_tuned(url, step)


def test_a_tuning_goes_on_where_the_optimizer_is_not_used_any_more(two_ranks: RankPool) -> None:
    trials = [{"bucket_bytes": size} for size in (64, 10**6, 64)]
    with ScriptedService([trials], is_ahead=True) as service:
        two_ranks.run(_tune_micro_batches, service.url, 0, 9)


def test_trials_of_steps_with_several_reductions_have_steps_that_are_wholly_their_own(
    two_ranks: RankPool,
) -> None:
    fast, slow = 64, 10**6
    trials = [{"bucket_bytes": size} for size in (fast, slow, fast, slow, fast)]
    with ScriptedService([trials], is_ahead=True) as service:
        two_ranks.run(_tune_micro_batches, service.url, slow)
        told: dict[int, list[float]] = {}
        for body in service.bodies("observations"):
            told.setdefault(body["trial"], []).extend(step["seconds"][0] for step in body["steps"])
    assert sorted(told) == list(range(len(trials) - 1))
    assert min(map(len, told.values())) >= 2
    for trial, seconds in told.items():
        hours = MICRO_BATCHES if trials[trial]["bucket_bytes"] == slow else 0
        assert [round(each / HOUR_SECONDS) for each in seconds] == [hours] * len(seconds)


def test_batches_of_a_step_add_up_and_the_next_step_begins_anew() -> None:
    complexity = BatchComplexity()
    assert complexity.take() is None
    for told in (3, 0.5, torch.tensor(4), torch.tensor([1.5])):
        complexity.tell(told)
    assert complexity.take() == 9.0
    assert complexity.take() is None
    complexity.tell(0)
    assert complexity.take() == 0.0


def test_inputs_of_too_many_parts_are_not_looked_at_to_the_end() -> None:
    endless: list[Any] = [torch.ones(3)]
    endless.append(endless)
    many = [[0] * 1000 for _ in range(1000)]
    assert elements_in(((torch.ones(2, 3), {"a": [torch.ones(4)], "b": None}), {})) == 10
    assert all(math.isnan(elements_in(each)) for each in (endless, many))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 1e19])
def test_a_number_that_can_be_none_makes_a_step_unknown_and_is_said_once(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    complexity = BatchComplexity()
    for _ in range(2):
        complexity.tell(5.0)
        complexity.tell(bad)
        assert complexity.take() is None
    complexity.tell(5.0)
    assert complexity.take() == 5.0
    (record,) = caplog.records
    assert "is left out: it must be from 0 to 1e+18" in record.getMessage()


@pytest.mark.parametrize(
    "wrong", ["12", None, [3], torch.ones(2), torch.ones((), device="meta"), 1j]
)
def test_what_is_no_number_is_an_error(wrong: Any) -> None:
    with pytest.raises(TypeError, match="a complexity must be a number"):
        BatchComplexity().tell(wrong)


def _told(rank: int, step: int) -> float:
    return 100.0 * (step % 5) + rank


def _train(url: str, tells: Callable[[int, int], float | None], passes: int = 1) -> None:
    """Each step of so many passes."""

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        for place in range(passes):
            if (told := tells(dist.get_rank(), number + 1)) is not None:
                model.report_complexity(told)
            with nullcontext() if place == passes - 1 else model.no_sync():
                model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    assert not until_tuned(url, step, torch.nn.Linear(8, 8)).module._forward_pre_hooks


def _steps(ranks: RankPool, *arguments: Any) -> list[dict[str, Any]]:
    """The steps that the service was told of."""
    with ScriptedService([[{"bucket_bytes": 10**6}, {"bucket_bytes": 64}]], steps=STEPS) as service:
        ranks.run(partial(_train, service.url), *arguments)
        return [step for body in service.bodies("observations") for step in body["steps"]]


def test_the_service_is_told_the_largest_of_the_ranks_of_all_batches_of_the_right_step(
    two_ranks: RankPool,
) -> None:
    steps = _steps(two_ranks, _told, 2)
    assert len(steps) >= 2 * STEPS
    assert all(step["complexity"] == 2 * _told(1, step["step"]) for step in steps)


def _told_by_rank_0(rank: int, step: int) -> float | None:
    return None if rank else _told(rank, step)


def test_what_only_some_ranks_tell_is_told_to_nobody(two_ranks: RankPool) -> None:
    """Not even together with what the others' inputs have: that is another unit."""
    steps = _steps(two_ranks, _told_by_rank_0)
    assert len(steps) >= 2 * STEPS
    assert not any("complexity" in step for step in steps)


def _told_from(first: int, _: int, step: int) -> float | None:
    return 7.0 if step >= first else None


def test_until_the_training_tells_it_the_models_inputs_do(two_ranks: RankPool) -> None:
    steps = _steps(two_ranks, partial(_told_from, STEPS), 2)
    assert len(steps) >= 2 * STEPS
    expected = {step: 2 * 7.0 if step >= STEPS else 2 * 16.0 for step in range(1, 2000)}
    assert all(each["complexity"] == expected[each["step"]] for each in steps)


def test_inputs_count_wherever_they_are_but_not_those_of_an_evaluation() -> None:
    """Of one process alone, whose model takes them by name and in containers."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = checkpoint_wrapper(torch.nn.Linear(4, 4))

        def forward(self, first: torch.Tensor, *, others: dict[str, Any]) -> torch.Tensor:
            return self.inner(first) + others["list"][0].sum()

    with ScriptedService([[{"recomputed_blocks": 1}]], steps=STEPS) as service:
        ours = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": service.url}
        with mock.patch.dict(os.environ, ours):
            model: Any = bagua_client.tune(Model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            for step in range(2000):
                given = {"list": [torch.ones(step % 3, 5)], "none": None}
                model(torch.ones(2, 4), others=given).sum().backward()
                optimizer.step()
                with torch.no_grad():
                    model(torch.ones(9, 4), others=given)
                if not model.is_tuning:
                    break
        told = [step for body in service.bodies("observations") for step in body["steps"]]
    assert len(told) >= STEPS
    assert all(each["complexity"] == 8 + 5 * ((each["step"] - 1) % 3) for each in told)


def test_without_tuning_nothing_happens(two_ranks: RankPool) -> None:
    two_ranks.run(_report_without_tuning)


def _report_without_tuning() -> None:
    DistributedDataParallel(torch.nn.Linear(8, 8)).report_complexity(3)


# Each rank's own computing time, told by real ranks: long on a slow rank, and on no other.


SLOW_SECONDS = 0.02


class _Model(torch.nn.Module):
    """One of its ranks computes longer; a layer may be unused, and it may have buffers."""

    def __init__(self, slow_rank: int, uses_all: bool = True, has_buffers: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.is_slow = dist.get_rank() == slow_rank
        self._used = len(self.layers) if uses_all else len(self.layers) - 1
        if has_buffers:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_slow:
            time.sleep(SLOW_SECONDS)
        for layer in self.layers[: self._used]:
            x = layer(x)
        return x.sum()


def _train_slowly(
    url: str,
    slow_rank: int = -1,
    slow_to_load: int = -1,
    uses_all: bool = True,
    passes: int = 1,
    accumulates: bool = False,
) -> None:
    """Until the tuning has ended.

    Args:
        slow_rank: computes longer in each forward pass.
        slow_to_load: waits for its data before; the model then has buffers to be broadcast.
        passes: backward passes for each step of the optimizer.
        accumulates: only the last of them communicates.
    """

    def step(model: Any, optimizer: torch.optim.Optimizer, _: int) -> None:
        if dist.get_rank() == slow_to_load:
            time.sleep(SLOW_SECONDS)
        for number in range(passes):
            is_last = number == passes - 1
            with model.no_sync() if accumulates and not is_last else nullcontext():
                model(torch.ones(2, 16)).backward()
        optimizer.step()

    plain = _Model(slow_rank, uses_all, has_buffers=slow_to_load >= 0)
    until_tuned(url, step, plain, find_unused_parameters=not uses_all)


def _computed_steps(ranks: RankPool, **arguments: Any) -> list[dict[str, Any]]:
    """The steps that the service was told of."""
    with ScriptedService([[{"bucket_bytes": 2000}]], steps=STEPS) as service:
        ranks.run(partial(_train_slowly, service.url, **arguments))
        return [step for batch in service.bodies("observations") for step in batch["steps"]]


def _medians(steps: list[dict[str, Any]], times: str) -> list[float]:
    """Of the two ranks."""
    first, second = zip(*(step[times] for step in steps), strict=True)
    return [median(first), median(second)]


@pytest.mark.parametrize("uses_all", [True, False])
def test_the_rank_that_is_slow_computes_longer_while_all_steps_are_alike(
    two_ranks: RankPool, uses_all: bool
) -> None:
    steps = _computed_steps(two_ranks, slow_rank=1, uses_all=uses_all)
    fast, slow = _medians(steps, "compute_seconds")
    assert slow >= SLOW_SECONDS
    assert slow - fast > SLOW_SECONDS / 2
    one, other = _medians(steps, "seconds")
    assert abs(one - other) < SLOW_SECONDS / 2
    for step in steps:
        for compute, whole in zip(step["compute_seconds"], step["seconds"], strict=True):
            assert 0 < compute <= whole


def test_waiting_for_the_buffers_of_a_rank_that_is_slow_to_load_is_not_computing(
    two_ranks: RankPool,
) -> None:
    slow, fast = _medians(_computed_steps(two_ranks, slow_to_load=0), "compute_seconds")
    assert slow - fast > SLOW_SECONDS / 2


@pytest.mark.parametrize("accumulates", [True, False])
def test_the_passes_of_a_step_compute_together(two_ranks: RankPool, accumulates: bool) -> None:
    """Whether each of them communicates or the last one alone."""
    steps = _computed_steps(two_ranks, slow_rank=1, passes=3, accumulates=accumulates)
    fast, slow = _medians(steps, "compute_seconds")
    assert slow - fast > 2 * SLOW_SECONDS
