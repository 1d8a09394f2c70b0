"""Threads that decide beside the requests."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bagua_autotune.model.job import Job, Observation, Trial
from bagua_autotune.search.searcher import RandomSearcher
from bagua_autotune.store import Store
from bagua_autotune.tuning.background import MOST_AT_ONCE, Pool
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration
from tests.autotune.support import Later, Ranks, make_spec, present

UNENDING = """
import threading
from bagua_autotune.tuning.background import Pool
Pool().start("job", threading.Event().wait)
"""


def test_a_decision_does_not_keep_the_process_from_ending():
    subprocess.run([sys.executable, "-c", UNENDING], check=True, timeout=60)


def test_a_failed_decision_is_logged_and_another_can_be_made(caplog):
    threads, done = Pool(), threading.Event()

    def fail() -> None:
        raise RuntimeError("singular")

    threads.start("job", fail)
    while not done.wait(0.01):
        threads.start("job", done.set)
    assert "job job: a decision failed" in caplog.text


def test_of_one_job_one_decision_is_made_at_a_time():
    pool, begun, go_on = Pool(), threading.Event(), threading.Event()
    more, done = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait()

    pool.start("job", first)
    assert begun.wait(60)
    pool.start("job", more.set)
    pool.start("other", done.set)
    assert done.wait(60)
    assert not more.is_set(), "another thread was free"
    assert pool.is_busy("job")
    go_on.set()
    assert more.wait(60)


def test_who_asked_first_comes_first_and_nobody_waits_twice():
    pool, go_on, done = Pool(), threading.Event(), threading.Event()
    turns: list[str] = []

    def turn(name: str) -> None:
        turns.append(name)
        if name == "greedy, first":
            pool.start("greedy", lambda: turn("greedy, last"))
        if name == "greedy, last":
            done.set()

    for place in range(MOST_AT_ONCE - 1):
        pool.start(f"long {place}", go_on.wait)
    begun = threading.Event()
    pool.start("last thread", lambda: (begun.set(), go_on.wait()))
    assert begun.wait(60)
    pool.start("greedy", lambda: turn("greedy, never"))
    pool.start("patient", lambda: turn("patient"))
    pool.start("greedy", lambda: turn("greedy, first"))
    assert len([t for t in threading.enumerate() if t.name == "decisions"]) >= MOST_AT_ONCE
    go_on.set()
    assert done.wait(60)
    assert turns.count("patient") == 1
    assert "greedy, never" not in turns
    assert turns.index("greedy, last") > turns.index("greedy, first")


def test_a_thread_that_could_not_be_started_is_not_counted(monkeypatch):
    pool, made = Pool(), []

    def fail(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for job in range(MOST_AT_ONCE + 1):
            with pytest.raises(RuntimeError):
                pool.start(f"job{job}", partial(made.append, job))
    done = threading.Event()
    pool.start("last", done.set)
    assert done.wait(60)
    assert made == list(range(MOST_AT_ONCE + 1))


def test_a_hundred_jobs_that_wait_take_no_thread_each():
    pool, go_on, done = Pool(), threading.Event(), threading.Semaphore(0)
    before = threading.active_count()
    for number in range(100):
        pool.start(f"job {number}", lambda: (go_on.wait(), done.release()))
    assert threading.active_count() <= before + MOST_AT_ONCE
    go_on.set()
    assert all(done.acquire(timeout=60) for _ in range(100))


STEADY = [Observation(step, (0.2,) * 4) for step in range(1, 40)]


def test_a_job_says_that_it_decides_and_others_are_answered_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on = threading.Event(), threading.Event()

    class Pondering(RandomSearcher):
        """Takes its time over what follows the baseline."""

        def ask(self) -> Configuration:
            if self._costs:
                begun.set()
                assert go_on.wait(60)
            return super().ask()

    make_searcher = "bagua_autotune.deciding.next_step.make_searcher"
    monkeypatch.setattr(make_searcher, lambda _, problem: Pondering(problem))
    store = Store(f"sqlite:///{tmp_path}/autotune.db")
    tuner = Tuner(store, background=Pool())
    tuner.register("job", make_spec())
    tuner.register("other", make_spec())
    assert not tuner.status("job").deciding
    assert tuner.observe("job", 0, STEADY).trial is not None, "answered before it is decided"
    assert begun.wait(60)
    status = tuner.status("job")
    assert status.deciding
    assert present(status.trial).index == 0, "what the ranks run until it is decided"
    # Of another job, and more of the same one.
    assert not tuner.observe("other", 0, STEADY[:2]).deciding
    assert len(store.observations.of("other")) == 2
    more = [Observation(step, (0.2,) * 4) for step in range(40, 44)]
    assert tuner.observe("job", 0, more).deciding
    assert len(store.observations.of("job")) == len(STEADY) + len(more)
    go_on.set()
    while tuner.status("job").deciding:
        pass
    assert [trial.state for trial in store.trials.of("job")] == ["measured", "proposed"]
    store.close()


class InterruptedStore(Store):
    """Something happens just before one of the next reads of a job or its trials."""

    reads_before = -1

    def __init__(self, url: str) -> None:
        super().__init__(url)
        get, of = self.jobs.get, self.trials.of

        def get_job(job_id: str) -> Job:
            self._read()
            return get(job_id)

        def get_trials(job_id: str) -> list[Trial]:
            self._read()
            return of(job_id)

        self.jobs.get, self.trials.of = get_job, get_trials  # type: ignore[method-assign]

    def interrupt(self, after: int, work: Callable[[], None]) -> None:
        self.reads_before, self._work = after, work

    def _read(self) -> None:
        self.reads_before -= 1
        if self.reads_before == -1:
            self._work()


@pytest.mark.parametrize("reads", range(2))
def test_a_decision_between_the_reads_of_a_status_shows_no_half_made_step(
    tmp_path: Path, reads: int
):
    """A job without a trial that is not over would make its ranks stop asking."""
    store, background = InterruptedStore(f"sqlite:///{tmp_path}/autotune.db"), Later()
    tuner = Tuner(store, "random", background=background)
    tuner.register("job", make_spec(limits={"max_samples": 3}))
    ranks = Ranks(noise=0.001)
    while trial := tuner.open_trial("job"):
        steps = ranks.run(trial.configuration, 4)
        found = [Observation(step, tuple(seconds)) for step, seconds in steps]
        store.interrupt(reads, background.finish)
        status = tuner.observe("job", trial.index, found)
        assert not background.is_busy("job"), "decided while the answer was made"
        store.reads_before = -1
        assert (status.trial is None) == (status.state == "finished")
        assert status.trial is None or status.trial.configuration == status.configuration
    assert tuner.status("job").state == "finished"
