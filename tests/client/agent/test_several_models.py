"""One model of a job is tuned at a time, whichever processes train them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from bagua_client import DistributedDataParallel
from bagua_client.agent.several_models import (
    IDLE_REDUCTIONS,
    IDLE_SECONDS,
    LEASE_SECONDS,
    Turn,
    Turns,
)
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.ranks import RankPool


class _Process:
    """One of a job's processes: its models' turns, which look at the store when the test says."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        # No thread: it would find no store.
        self.turns = Turns(lambda: None, lambda: job.now)

    def turn(self, name: str) -> Turn:
        return Turn(name, lambda: self.turns, lambda: self._job.now)

    def takes(self, turn: Turn) -> bool:
        turn.take(0)
        self.looks()
        return turn.take(0)

    def looks(self) -> None:
        self.turns.look(self._job.store)


class _Job:
    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.now = 0.0


def test_the_next_one_is_tuned_when_the_one_before_is_done() -> None:
    job = _Job()
    one, other = _Process(job), _Process(job)
    first, second = one.turn("first"), other.turn("second")
    assert one.takes(first)
    assert not other.takes(second)
    assert second.is_anothers
    assert not first.is_anothers
    assert other.turns.holder == "first"
    first.leave()
    assert not other.takes(second)
    one.looks()  # gives it back
    assert other.takes(second)
    one.looks()
    assert first.is_anothers
    assert not one.takes(first)
    second.close()
    other.looks()
    assert one.takes(first)


def test_models_of_one_process_pass_it_on_in_their_order() -> None:
    job = _Job()
    process, other = _Process(job), _Process(job)
    first, second, third = (process.turn(name) for name in ("first", "second", "third"))
    assert process.takes(first)
    assert not process.takes(second)
    assert not process.takes(third)
    assert third.is_anothers
    assert not other.takes(elsewhere := other.turn("elsewhere"))
    first.leave()
    assert not third.take(0)
    assert second.take(0)
    assert not first.take(0), "it asks again, and comes after those that wait"
    second.leave()
    first.leave()
    assert third.take(0)
    third.close()
    process.looks()
    assert other.takes(elsewhere)


def test_a_process_that_died_holds_nobody_up_for_ever() -> None:
    job = _Job()
    one, other = _Process(job), _Process(job)
    assert one.takes(one.turn("dies"))
    waiting, started = other.turn("waits"), job.now
    while not other.takes(waiting):
        assert waiting.is_anothers
        job.now += 1.0
        assert job.now < 2 * LEASE_SECONDS
    assert job.now - started > LEASE_SECONDS


def test_one_that_comes_back_late_has_lost_it() -> None:
    job = _Job()
    one, other = _Process(job), _Process(job)
    assert one.takes(hung := one.turn("hung"))
    for _ in range(2):
        other.takes(taking := other.turn("takes"))
        job.now += LEASE_SECONDS + 1
    assert other.takes(taking)
    assert not one.takes(hung)
    assert hung.is_anothers


def test_a_model_that_makes_no_step_holds_nobody_up() -> None:
    job = _Job()
    one, other = _Process(job), _Process(job)
    idle, beside, waiting = one.turn("idle"), one.turn("beside"), other.turn("waits")
    assert one.takes(idle)
    seconds = 0.0
    while not other.takes(waiting):
        one.looks()  # Its process is there, and renews it.
        job.now, seconds = job.now + 10, seconds + 10
        assert seconds < 2 * IDLE_SECONDS
    assert seconds >= IDLE_SECONDS
    waiting.leave()
    other.looks()
    assert one.takes(beside)
    assert not one.takes(idle)


def test_a_model_of_this_process_that_was_left_holds_the_next_up_for_few_steps() -> None:
    process = _Process(_Job())
    left, trained = process.turn("left"), process.turn("trained")
    assert process.takes(left)
    for step in range(IDLE_REDUCTIONS + 1):
        assert not trained.take(step)
    assert trained.take(IDLE_REDUCTIONS + 1)


def test_models_that_take_turns_in_fewer_steps_do_not_lose_it() -> None:
    process = _Process(_Job())
    first, second = process.turn("first"), process.turn("second")
    assert process.takes(first)
    for step in range(100, 1000, 100):
        assert first.take(step)
        assert not second.take(step)


def test_without_the_store_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bagua_client")

    def gone() -> dist.Store:
        raise dist.DistNetworkError("Connection reset by peer")

    turns = Turns(gone)
    turn = Turn("alone", lambda: turns)
    turn.take(0)
    deadline = time.monotonic() + 20  # only to find a hang
    while not turn.take(0):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (line,) = caplog.messages
    assert "Connection reset by peer" in line


def _stages(url: str) -> list[str]:
    """Two pipeline stages of two ranks each, and a model of all ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    with tuned_at(url, JOB="stages"):
        models = [
            DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
            for group in (groups[stage], None)
        ]
    is_tuning = torch.ones(1)
    while is_tuning:
        for _ in range(10):
            for model in models:
                model(torch.ones(2, 4)).sum().backward()
        is_tuning[:] = any(model.is_tuning for model in models)
        dist.all_reduce(is_tuning, op=dist.ReduceOp.MAX)
    # The pool's ranks may have wrapped models for other tests, which then have the first numbers.
    return [model.tuning.job.partition("#")[0] for model in models]


def test_models_on_different_ranks_are_different_jobs_and_tuned_one_after_the_other(
    four_ranks: RankPool,
) -> None:
    with ScriptedService([[{"bucket_bytes": 3000}, {"bucket_bytes": 1000}]]) as service:
        jobs = four_ranks.run(_stages, service.url)
        requests = list(service.requests)
    assert jobs == [["stages@0-1", "stages"]] * 2 + [["stages@2-3", "stages"]] * 2
    begun, trials = [], []
    for kind, body in requests:
        if kind == "PUT":
            begun.append(body["name"].partition("#")[0])
            trials.append([])
        elif kind == "observations":
            trials[-1].append(body["trial"])
    assert sorted(begun) == ["stages", "stages@0-1", "stages@2-3"]
    for tried in trials:
        assert tried == sorted(tried), "another job's would begin at the first trial again"
        assert set(tried) == {0, 1}
