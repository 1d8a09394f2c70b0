"""The service fails in each moment of a tuning: how soon the job is back at what is confirmed."""

from __future__ import annotations

import logging
import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import requests

from bagua_client.reporter.drift import BLOCK_STEPS, REFERENCE_BLOCKS
from bagua_client.service.absence import SILENT_REDUCTIONS, SILENT_SECONDS
from bagua_simulator import cases
from benchmarks.support.fault_injection.served_job import Lines, ReportingTuner, ServedJob
from benchmarks.support.harness import print_table
from benchmarks.testbed.job import free_port
from tests.autotune.server import ServeProcess
from tests.autotune.simulated_job import SWITCH_STEPS
from tests.e2e.test_faults import nonsense

STEP_SECONDS = 0.01
AWAY_SECONDS = 20.0
MOST_SECONDS = 300.0
SLOWER = 1.5
"""So much longer steps take some time after the first result, so that another round is tuned."""
LEARNED_STEPS = 2 * BLOCK_STEPS * REFERENCE_BLOCKS
"""By then it is known how long they took before."""
SPARE_SECONDS = 2.0
"""Until a request meets the failure, and for a machine whose cores others use, too."""
WAYS = ("killed", "frozen", "nonsense")
MOMENTS = (
    "registering",
    "switched",
    "measuring",
    "deciding",
    "confirming",
    "second round",
    "after the tuning",
)


@dataclass(frozen=True)
class Back:
    """What became of one tuning whose service failed.

    Attributes:
        moment: of MOMENTS; ``way``: of WAYS.
        slowdown: of the trial that the ranks were in, over the default; 1: they were in none.
        steps: from the failure until they were back; None: they never were.
        seconds: likewise.
        switches: configurations that they changed to while the service was away, without a trial
            that it had asked for just before.
        goes_on_after: seconds from its return until they were in a trial again; None: never, or
            there was nothing to go on with.
        place: the configuration that the tuning ended at, as in Ended; empty: it did not end.
    """

    moment: str
    way: str
    slowdown: float
    steps: int | None
    seconds: float | None
    switches: int
    goes_on_after: float | None
    place: str

    @property
    def is_right(self) -> bool:
        """Whether they were back in time, once, and the tuning ended."""
        if self.steps is None or self.seconds is None or self.switches > 1 or not self.place:
            return False
        most_seconds = SILENT_SECONDS + SPARE_SECONDS
        most_steps = math.ceil(most_seconds / STEP_SECONDS) + SILENT_REDUCTIONS + SWITCH_STEPS
        return self.steps <= most_steps


class _Job(ServedJob):
    """A simulated job that begins a second round if it is told to."""

    def change(self) -> None:
        self.disturbed = lambda step: SLOWER

    @property
    def is_in_trial(self) -> bool:
        return self._trial is not None

    def is_at(self, moment: str, state: Callable[[], str]) -> bool:
        """Whether the tuning is in that moment now, in a trial that is not the default."""
        round_is_second = len([s for s in self.switches if s.trial is None]) > 0
        if moment == "after the tuning":
            return self.is_finished
        if self._trial is None or self.configuration == self.baseline:
            return False
        since = self.step - self.switches[-1].step
        if moment == "switched":
            return since == 0
        if moment == "measuring":
            return since == SWITCH_STEPS and not round_is_second
        if moment == "deciding":
            return self.tuner.reporter._conversation._poll_seconds is not None
        if moment == "confirming":
            return since == SWITCH_STEPS and state() == "confirming"
        return since == SWITCH_STEPS and round_is_second


class _Service:
    """A real service that fails in one of the ways, and comes back on the same database."""

    def __init__(self, folder: Path) -> None:
        self._database, self._port = folder / "store.db", free_port()
        self._process = self._start()
        self.url = self._process.url

    def _start(self) -> ServeProcess:
        return ServeProcess(self._database, "--port", str(self._port)).__enter__()

    def state(self) -> str:
        """Of its only job."""
        (job,) = requests.get(f"{self.url}/api/v2/jobs", timeout=60).json()["jobs"]
        return str(job["state"])

    @contextmanager
    def failing(self, way: str) -> Iterator[None]:
        if way == "frozen":
            self._process.process.send_signal(signal.SIGSTOP)
            yield
            self._process.process.send_signal(signal.SIGCONT)
            return
        self._process.__exit__(None, None, None)
        if way == "killed":
            yield
        else:
            with nonsense(500, b"<html>Internal Server Error</html>", port=self._port):
                yield
        self._process = self._start()

    def close(self) -> None:
        self._process.__exit__(None, None, None)


def tune(setting: tuple[str, str, int]) -> Back:
    """One tuning, in a process of its own, whose service fails in this moment and way."""
    logging.getLogger("bagua_client").addHandler(Lines())
    with tempfile.TemporaryDirectory() as folder:
        service = _Service(Path(folder))
        try:
            return _tune(service, *setting)
        finally:
            service.close()


def _tune(service: _Service, moment: str, way: str, seed: int) -> Back:
    named = [each for each in cases() if each.simulator.cluster.nodes == 4]
    simulator = named[seed % len(named)].simulator
    tuner = ReportingTuner(service.url, 300.0)

    def begin() -> _Job:
        return _Job(
            tuner, simulator, "job", seed, fingerprint=str(seed), pause_seconds=STEP_SECONDS
        )

    def run_until(condition: Callable[[], bool], seconds: float = MOST_SECONDS) -> float | None:
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                return None
            job.run(1)
        return time.monotonic() - began

    job: _Job
    if moment == "registering":
        failing = service.failing(way)
        failing.__enter__()
        job = begin()
    else:
        job = begin()
        if moment == "second round":
            run_until(lambda: job.is_finished)
            job.run(LEARNED_STEPS)
            job.change()
        if run_until(lambda: job.is_at(moment, service.state)) is None:
            tuner.reporter.close(5.0)
            return Back(moment, way, 1.0, None, None, 0, None, "")  # a row of nothing, and wrong
        failing = service.failing(way)
        failing.__enter__()
    failed_at, first, confirmed = job.step, len(job.switches), job.baseline
    slowdown = job.true_seconds(job.configuration) / job.true_seconds(job.baseline)
    was_in_trial = job.is_in_trial
    if moment in ("second round", "after the tuning"):
        confirmed = next(s.configuration for s in job.switches if s.trial is None)
    began = time.monotonic()
    seconds = run_until(
        lambda: not job.is_in_trial and job.configuration == confirmed, AWAY_SECONDS
    )
    steps = job.step - failed_at
    run_until(lambda: time.monotonic() - began > AWAY_SECONDS)
    switches = len([each for each in job.switches[first:] if each.trial is None])
    failing.__exit__(None, None, None)
    goes_on_after = run_until(lambda: job.is_in_trial) if was_in_trial else None
    ended = run_until(lambda: job.is_finished)
    place = "default" if job.configuration == job.baseline else "winner"
    tuner.reporter.close(5.0)
    return Back(
        moment,
        way,
        slowdown if was_in_trial else 1.0,
        None if seconds is None else steps,
        seconds,
        switches,
        goes_on_after,
        "" if ended is None else place,
    )


def run(seed: int, at_once: int) -> list[Back]:
    """Each moment with each way, beside one another."""
    settings = [(moment, way, seed) for moment in MOMENTS for way in WAYS]
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as processes:
        return list(processes.map(tune, settings))


def show(found: Sequence[Back]) -> bool:
    """Print what became of each; whether all is right."""

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    rows = [
        (
            each.moment,
            each.way,
            f"{1 / each.slowdown:.2f}x",
            number(each.steps, 0),
            number(each.seconds, 1),
            str(each.switches),
            number(each.goes_on_after, 1),
            each.place,
            "" if each.is_right else "WRONG",
        )
        for each in found
    ]
    heads = ("moment", "service", "trial at", "steps until back", "s", "switches", "on after, s")
    print_table((*heads, "ended at", ""), rows)
    return all(each.is_right for each in found)
