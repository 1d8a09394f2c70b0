"""Threads that decide beside the requests; and several replicas on one database: each step is
decided once, whoever is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from bagua_autotune.model.job import Event, Job, Observation, Trial
from bagua_autotune.search.searcher import RandomSearcher
from bagua_autotune.store import Store
from bagua_autotune.store.claims import CLAIM_SECONDS, is_in_force
from bagua_autotune.tuning.background import MOST_AT_ONCE, Pool, TunerListener
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration
from tests.autotune.support import Clock, Later, Ranks, make_spec, present

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


class Counted(TunerListener):
    def __init__(self) -> None:
        self.decisions = 0
        self.failures: list[Exception] = []

    def on_decided(self, seconds: float) -> None:
        self.decisions += 1

    def on_failed(self, error: Exception) -> None:
        self.failures.append(error)


def test_two_replicas_decide_each_step_once(empty_url: str) -> None:
    counted, ranks, turn = [Counted(), Counted()], Ranks(noise=0.01), threading.Lock()
    tuners = [Tuner(Store(empty_url), "random", [each], background=Pool()) for each in counted]
    tuners[0].register("job", make_spec(limits={"max_samples": 12}))

    def report(tuner: Tuner) -> None:
        while (status := tuner.ask("job")).state != "finished":
            if status.trial is None:
                continue
            with turn:
                steps = ranks.run(status.configuration, 2)
            found = [Observation(step, tuple(seconds)) for step, seconds in steps]
            tuner.observe("job", status.trial.index, found)

    with ThreadPoolExecutor() as threads:
        list(threads.map(report, [*tuners, *tuners]))
    trials = tuners[0].store.trials.of("job")
    assert [trial.state for trial in trials] == ["measured"] * len(trials)
    # The first trial is the baseline, which is no decision; the last one is the result.
    assert sum(each.decisions for each in counted) == len(trials)
    assert not [failure for each in counted for failure in each.failures]
    for tuner in tuners:
        tuner.store.close()


def test_what_a_killed_replica_was_deciding_is_decided_by_another(empty_url: str) -> None:
    clock, counted = Clock(), Counted()
    tuner = Tuner(Store(empty_url), "random", [counted], clock)
    tuner.register("job", make_spec())
    assert tuner.store.claims.take("job", "killed", clock())
    status = tuner.observe("job", 0, STEADY)
    assert (status.deciding, counted.decisions) == (True, 0)
    assert status.trial is not None
    assert status.trial.index == 0, "the ranks go on as they are"
    clock.now += CLAIM_SECONDS
    status = tuner.observe("job", 0, [Observation(40, (0.2,) * 4)])
    assert (status.deciding, counted.decisions) == (False, 1)
    assert status.trial is not None
    assert status.trial.index == 1
    tuner.store.close()


def test_a_claim_that_ran_out_is_not_given_back_by_its_owner(empty_url: str) -> None:
    clock, store = Clock(), Store(empty_url)
    store.jobs.create("job", make_spec(), at=1.0)
    with store.claims.claimed("job", clock) as first:
        with store.claims.claimed("job", clock) as second:
            assert (first, second) == (True, False)
        clock.now += CLAIM_SECONDS
        assert store.claims.take("job", "another", clock())
    with store.claims.claimed("job", clock) as fourth:
        assert not fourth
    with store.claims.claimed("nobody", clock) as unknown:
        assert not unknown
    clock.now -= 3 * CLAIM_SECONDS  # It was ahead, and has been set right.
    (_, until), now = store.jobs.contact_and_claim("job"), clock()
    assert not is_in_force(until or 0.0, now)
    assert store.claims.take("job", "of now", now)
    assert is_in_force(store.jobs.contact_and_claim("job")[1] or 0.0, now)
    store.close()


def test_a_trial_that_failed_is_closed_though_nobody_lives_to_decide(tmp_path: Path) -> None:
    class Lost:
        """A service that is killed before it decides."""

        def start(self, key: str, work: object) -> None: ...

        def is_busy(self, key: str) -> bool:
            return False

    store = Store(f"sqlite:///{tmp_path / 'autotune.db'}")
    tuner = Tuner(store, "random", background=Lost())
    tuner.register("job", make_spec())
    tuner.take_event("job", Event("disagreement", 0, 5, "x"))
    assert [trial.state for trial in store.trials.of("job")] == ["failed"]
    assert tuner.ask("job").trial is None
    another = Tuner(store, "random")
    status = another.ask("job")
    assert present(status.trial).index == 1
    store.close()
