"""Several replicas on one database: each step is decided once, whoever is killed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.store.trials import CLAIM_SECONDS, is_in_force
from bagua_autotune.tuning.background import Pool, TunerListener
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.support import Clock, Ranks, make_spec, present

STEADY = [Observation(step, (0.2,) * 4) for step in range(1, 40)]


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
