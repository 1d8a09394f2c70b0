"""Threads that decide beside the requests."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from bagua_autotune.model.job import Limits
from bagua_autotune.store import Store
from bagua_autotune.tuning.background import DaemonThreads
from bagua_autotune.tuning.bagua.tuning import BaguaTuning
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.tuning.bagua_worker import Worker, cycle, enter

UNENDING = """
import threading
from bagua_autotune.tuning.background import DaemonThreads
DaemonThreads().start("job", threading.Event().wait)
"""


def test_a_decision_does_not_keep_the_process_from_ending():
    subprocess.run([sys.executable, "-c", UNENDING], check=True, timeout=60)


def test_a_failed_decision_is_logged_and_another_can_be_made(caplog):
    threads, done = DaemonThreads(), threading.Event()

    def fail() -> None:
        raise RuntimeError("singular")

    threads.start("job", fail)
    while not done.wait(0.01):
        threads.start("job", done.set)
    assert "job job: a decision failed" in caplog.text


def test_of_one_job_one_decision_is_made_at_a_time():
    threads, begun, go_on = DaemonThreads(), threading.Event(), threading.Event()
    more: list[str] = []

    def first() -> None:
        begun.set()
        go_on.wait()

    threads.start("job", first)
    assert begun.wait(60)
    threads.start("job", lambda: more.append("job"))
    other = threading.Event()
    threads.start("other", other.set)
    assert other.wait(60)
    go_on.set()
    assert more == []


def test_requests_are_answered_while_a_decision_is_made(tmp_path: Path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    decide = Tuner.close_trial

    def slow(*arguments) -> bool:
        begun.set()
        go_on.wait()
        return decide(*arguments)

    monkeypatch.setattr(Tuner, "close_trial", slow)
    store = Store(f"sqlite:///{tmp_path}/autotune.db")
    limits = Limits(trial_seconds=0.001, warmup_seconds=0)
    service = BaguaTuning(Tuner(store, "random"), limits, world_size=2)
    workers = [Worker(service, "net", rank, lambda *_: 1.0) for rank in range(2)]
    enter(workers)
    for iteration in range(100, 1000, 100):
        cycle(workers, iteration)
    assert begun.wait(60)
    go_on.set()
    iteration = 1000
    while len(store.trials(store.jobs()[0].id)) < 2:
        cycle(workers, iteration)
        iteration += 100
    store.close()
