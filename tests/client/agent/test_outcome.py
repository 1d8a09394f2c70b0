"""What whoever trains is told of a tuning: ``model.tuning``, callbacks, and a line for scripts."""

from __future__ import annotations

import atexit
import gc
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.optim.optimizer import register_optimizer_step_post_hook

import bagua_client
from bagua_client import Configuration, DistributedDataParallel, Tuning
from bagua_client.agent import outcome, switching
from bagua_client.announcement import ENDED_FIRST
from bagua_client.environment import Environment
from bagua_client.measuring import rank_measurement
from bagua_client.tuning import write_result_line
from tests.client.agent.scripted_service import RESULT, ScriptedService, tuned_at
from tests.client.agent.test_watching import MadeUpClock
from tests.client.listening import logged
from tests.client.reporter.test_reporter import wait_for
from tests.ranks import RankPool

FIRST = [{"bucket_bytes": 3000}, {"bucket_bytes": 1000, "channels": 2}]
SECOND = [{"bucket_bytes": 5000}, {"bucket_bytes": 2000}]
DEFAULT = Configuration(first_bucket_bytes=2**20)
MOST_STEPS = 4000


class _Job:
    """A tuned training with an optimizer, and what it was told.

    Attributes:
        seen: for each step the state in it.
        told: what callbacks were given, in which step, and whether on the training thread, outside
            of a backward pass.
    """

    def __init__(self, stock: bool = False) -> None:
        layers = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(5)])
        if stock:
            self.model: DistributedDataParallel = bagua_client.tune(Stock(layers))  # type: ignore
        else:
            self.model = DistributedDataParallel(layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.is_backward = False
        self.seen: list[str] = []
        self.best: set[Configuration | None] = set()
        self.told: list[tuple[int, bool, Tuning]] = []

    def tell(self, tuning: Tuning) -> None:
        is_main = threading.current_thread() is threading.main_thread() and not self.is_backward
        # As a user may: something collective.
        dist.barrier()
        self.told.append((len(self.seen), is_main, tuning))

    def train(self, clock: MadeUpClock, seconds: float, until: str = "", steps: int = 1) -> None:
        """So many steps, or until that state."""
        for _ in range(MOST_STEPS if until else steps):
            clock.now += seconds
            self.model.zero_grad()
            loss = self.model(torch.ones(1, 16) * (dist.get_rank() + 1)).sum()
            self.is_backward = True
            loss.backward()
            self.is_backward = False
            # Whoever else has a hook, behind ours: torch goes through all of them.
            other = register_optimizer_step_post_hook(lambda *_: None)
            self.optimizer.step()
            other.remove()
            self.seen.append(self.model.tuning.state)
            self.best.add(self.model.tuning.best)
            time.sleep(0.001)
            if self.seen[-1] == until:
                return
        assert not until, self.seen[-1]


def _raise(_: Tuning) -> None:
    raise KeyError("the user's own")


def _two_rounds(url: str, path: str, stock: bool) -> dict[str, Any]:
    clock = MadeUpClock()
    kept: list[_Job] = []
    removed: list[Tuning] = []
    # Before the model is wrapped.
    handles = [bagua_client.on_tuned(_raise), bagua_client.on_tuned(lambda t: kept[0].tell(t))]
    once = bagua_client.on_tuned(removed.append)
    timed = mock.patch.object(rank_measurement, "clock_for", return_value=clock)
    with logged(logging.ERROR) as lines, timed:
        with tuned_at(url, JOB="j", RESULT=path):
            kept.append(job := _Job(stock))
        begun = job.model.tuning
        job.train(clock, 0.1, until="tuning")
        running = job.model.tuning
        job.train(clock, 0.1, until="finished")
        once.remove()
        best, late = set(job.best), list[Tuning]()
        handles.append(bagua_client.on_tuned(late.append))
        job.train(clock, 0.1, steps=300)
        handles.pop().remove()
        job.train(clock, 0.2, until="tuning")
        job.train(clock, 0.2, until="finished")
        job.train(clock, 0.2, steps=5)
    for handle in handles:
        handle.remove()
    found = {"begun": begun, "running": running, "told": job.told, "best": best, "seen": job.seen}
    last = job.model.tuning
    return {**found, "removed": removed, "late": late, "last": last, "lines": lines}


def _same(tuning: Tuning) -> dict[str, Any]:
    """What all ranks must agree on."""
    document = tuning.to_json()
    return {name: document[name] for name in document if name not in ("rank", "page")}


@pytest.mark.parametrize("stock", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_round_is_told_to_all_ranks_in_the_same_step(
    two_ranks: RankPool, tmp_path: Path, stock: bool
) -> None:
    path = tmp_path / "results.jsonl"
    with ScriptedService([FIRST, SECOND]) as service:
        ranks = two_ranks.run(_two_rounds, service.url, str(path), stock)
        page = service.url + "/jobs/"
    for rank, found in enumerate(ranks):
        assert found["begun"].state == "waiting"
        assert found["begun"].configuration == found["begun"].default == DEFAULT
        running, (first, second) = found["running"], found["told"]
        assert (running.job[0], running.trials, running.best) == ("j", 0, None)
        # While the second is tried, the first is the best so far.
        assert found["best"] == {None, Configuration(3000), Configuration(1000, channels=2)}
        assert [is_main for _, is_main, _ in found["told"]] == [True, True]
        result = first[2]
        assert {name: getattr(result, name) for name in RESULT} == RESULT
        assert result.best == result.configuration == Configuration(1000, channels=2)
        assert (result.state, result.round, second[2].round) == ("finished", 0, 1)
        assert second[2].best == Configuration(2000)
        assert result.page.startswith(page) == (rank == 0)
        assert found["removed"] == found["late"] == [result]
        assert found["last"] == second[2]
        assert len(found["lines"]) == 2
        assert f"callback of on_tuned failed on rank {rank}" in found["lines"][0]
    steps = [[(step, _same(tuning)) for step, _, tuning in found["told"]] for found in ranks]
    assert steps[0] == steps[1]
    assert ranks[0]["seen"] == ranks[1]["seen"]
    # In the step in which it ends, at the optimizer's step.
    assert ranks[0]["seen"][steps[0][0][0]] == "finished"
    assert ranks[0]["seen"][steps[0][0][0] - 1] == "tuning"
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["round"] for line in written] == [0, 1]
    assert {name: written[0][name] for name in RESULT} == RESULT
    assert written[0]["best"] == Configuration(1000, channels=2).to_json()
    assert (written[0]["format"], written[0]["state"]) == (1, "finished")


def _fail_on(rank: int, url: str, path: str) -> tuple[list[Tuning], str]:
    told: list[Tuning] = []
    handle = bagua_client.on_tuned(told.append)
    original, calls = switching.LossGuard.take, []

    def take(guard: Any) -> Any:
        calls.append(guard)
        if dist.get_rank() == rank and len(calls) == 5:
            raise MemoryError("of this rank alone")
        return original(guard)

    with mock.patch.object(switching.LossGuard, "take", take), tuned_at(url, JOB="j", RESULT=path):
        model = DistributedDataParallel(torch.nn.Linear(16, 16))
        for _ in range(MOST_STEPS):  # without an optimizer: told before the next forward pass
            model(torch.ones(1, 16)).sum().backward()
            if told:
                break
    handle.remove()
    return told, str(model.tuning)


def test_an_error_on_one_rank_is_the_reason_on_all(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ScriptedService([FIRST], steps=1000) as service:
        for told, words in two_ranks.run(_fail_on, 1, service.url, str(path)):
            (tuning,) = told
            assert (tuning.state, tuning.speedup, tuning.best) == ("failed", None, None)
            assert tuning.configuration == tuning.default
            assert words == "failed: an error on rank 1; see the log of that rank"
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["reason"] == "an error on rank 1; see the log of that rank"


def _without_a_result(url: str, path: str) -> list[str]:
    """For several models one after the other, what their tuning is."""
    found = [str(DistributedDataParallel(torch.nn.Linear(4, 4)).tuning)]
    with tuned_at(url, JOB="j", RESULT=path):
        job = _Job()
        job.train(MadeUpClock(), 0.1, until="tuning")
        del job  # the training ends
        refused = DistributedDataParallel(torch.nn.Linear(4, 4), bucket_cap_mb_list=[1, 2])
        found.append(str(refused.tuning))
    return found


def test_a_tuning_without_a_result_says_why(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ScriptedService([FIRST], steps=1000) as service:
        for off, refused in two_ranks.run(_without_a_result, service.url, str(path)):
            assert off == "off: BAGUA_AUTOTUNE=1 is not set"
            assert refused == "off: bucket_cap_mb_list was given, which already sets each bucket"
    ended, refused = map(json.loads, path.read_text().splitlines())
    assert (ended["state"], refused["state"]) == ("failed", "off")
    assert ended["reason"] == ENDED_FIRST
    assert refused["reason"].startswith("bucket_cap_mb_list")


def _drop(url: str) -> bool:
    """Whether a model is gone that was dropped before its result could be told."""
    with tuned_at(url, JOB="j"):
        model = DistributedDataParallel(torch.nn.Linear(16, 16))
    for _ in range(MOST_STEPS):
        model(torch.ones(1, 16)).sum().backward()
        if model.tuning.state == "finished":
            break
    weight = weakref.ref(model.module.weight)
    del model
    gc.collect()
    return weight() is None


def test_a_model_that_was_dropped_is_gone(two_ranks: RankPool) -> None:
    with ScriptedService([FIRST]) as service:
        assert two_ranks.run(_drop, service.url) == [True, True]


@pytest.fixture
def ending_ranks() -> Iterator[RankPool]:
    """Of their own: a process that ran the interpreter's exit hooks is no good to other tests."""
    pool = RankPool([2])
    yield pool
    pool.close()


def _leave(url: str, path: str) -> int:
    """What the interpreter does at its end; how many steps were made until then."""
    with tuned_at(url, JOB="j", RESULT=path):
        job = _Job()
    job.train(MadeUpClock(), 0.1, until="tuning")
    if (child := os.fork()) == 0:
        atexit._run_exitfuncs()  # a worker of the training's: nothing has ended
        os._exit(0)
    os.waitpid(child, 0)
    atexit._run_exitfuncs()
    return len(job.seen)


def test_a_process_that_ends_leaves_a_line_and_tells_its_last_step(
    ending_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    with ScriptedService([FIRST], steps=1000) as service:
        steps, _ = ending_ranks.run(_leave, service.url, str(path))
        told = wait_for(lambda: service.bodies("ended"))
    assert [body["step"] for body in told] == [steps]
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["state"], line["reason"], line["summary"]) == ("failed", ENDED_FIRST, ENDED_FIRST)
    assert line["at_step"] == steps
    for unknown in ("steps", "seconds", "cost_steps", "cost_seconds"):
        assert line[unknown] is None


def _leave_in_second_round(url: str, path: str) -> list[str]:
    """What is said at the end."""
    clock = MadeUpClock()
    with mock.patch.object(rank_measurement, "clock_for", return_value=clock):
        with tuned_at(url, JOB="j", RESULT=path):
            job = _Job()
        job.train(clock, 0.1, until="finished")
        job.train(clock, 0.1, steps=300)
        job.train(clock, 0.2, until="tuning")
    with logged() as lines:
        atexit._run_exitfuncs()
    return lines


@pytest.mark.slow
def test_a_training_that_ends_while_it_is_tuned_again_says_which_result_is_of_which_round(
    ending_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    summary = f"{ENDED_FIRST}; before that (round 0): {RESULT['summary']}"
    with ScriptedService([FIRST, SECOND]) as service:
        said, _ = ending_ranks.run(_leave_in_second_round, service.url, str(path))
    line = f"autotune: {summary.replace(ENDED_FIRST, f'{ENDED_FIRST}; its trials are kept')}"
    assert [each for each in said if "autotune" in each] == [line]
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["round"], first["state"], first["steps"]) == (0, "finished", RESULT["steps"])
    assert (second["round"], second["state"], second["summary"]) == (1, "failed", summary)
    assert (second["reason"], second["steps"], second["cost_steps"]) == (ENDED_FIRST, None, None)


def _waits(url: str) -> tuple[list[str], list[str]]:
    """The reasons in turn, and what is said."""
    with logged() as lines:
        with tuned_at(url, JOB="j"):
            first, second = (
                DistributedDataParallel(torch.nn.Linear(3, 3)).eval() for _ in range(2)
            )
        reasons = [second.tuning.reason]
        with mock.patch.object(outcome, "PATIENCE_SECONDS", 0.0):
            second(torch.ones(1, 3))
        with first.join():
            first(torch.ones(1, 3)).sum().backward()
            reasons.append(first.tuning.reason)
        for model in (second, first):
            for _ in range(4):
                model(torch.ones(1, 3)).sum().backward()
                reasons.append(model.tuning.reason)
        assert {first.tuning.state, second.tuning.state} == {"waiting"}
        del model, first, second
        gc.collect()
    return reasons, [line for line in lines if "tuned" in line]


def test_when_the_process_group_is_gone_no_model_is_asked_what_it_waited_for() -> None:
    tunable = mock.Mock(is_left=False, refusal="an error in looking at the model")
    with mock.patch.object(dist, "is_initialized", return_value=False):
        found = outcome.awaited(tunable, 3, True, Environment.read())
    assert found == "another model of this job, which is tuned first"


def test_what_a_model_waits_for_is_its_reason_and_is_said(two_ranks: RankPool) -> None:
    # Nobody listens there.
    (reasons, said), (others, silent) = two_ranks.run(_waits, "http://127.0.0.1:9")
    words = ["backward pass", "join()", "order", "the service", "another model"]
    places = [next(i for i, reason in enumerate(reasons) if word in reason) for word in words]
    assert places == sorted(places)
    assert "another model" in reasons[-1]
    # Of the turns only rank 0 knows.
    assert [a == b for a, b in zip(reasons, others, strict=True)].count(False) > 1
    assert all("rank 0" in b for a, b in zip(reasons, others, strict=True) if a != b)
    late, *ends = said
    assert late.startswith(
        "autotune: the model is not tuned yet; this waits for the first backward"
    )
    assert len(ends) == 2
    assert all(end.startswith("autotune: the model was never tuned; this waited") for end in ends)
    assert silent == []


def test_only_a_function_can_be_called() -> None:
    with pytest.raises(TypeError, match="a function of a Tuning, not a str"):
        bagua_client.on_tuned("wandb")  # type: ignore[type-var]


def test_a_result_that_cannot_be_written_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = Tuning(state="off", configuration=DEFAULT, default=DEFAULT, rank=0, page="u#token=x")
    write_result_line(str(tmp_path / "no" / "folder"), tuning)
    assert "BAGUA_AUTOTUNE_RESULT: the result cannot be written" in caplog.text
    write_result_line("-", tuning)
    assert json.loads(capsys.readouterr().out)["page"] == "u"  # who reads it shall not get in
