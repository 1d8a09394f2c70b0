"""A job that a test drives, trial by trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.support import Ranks, make_spec

JOB = "job"
SLOW_RANK = 2


class DrivenJob:
    """Registers a job of four ranks, one of which computes longest.

    Args:
        database: file of the SQLite database.
        name: the job's.
    """

    def __init__(self, database: Path, name: str = "digits") -> None:
        self._tuner = Tuner(Store(f"sqlite:///{database}"))
        self._ranks = Ranks(noise=0.001)
        self._tuner.register(JOB, make_spec(name=name))

    def run(self, until_trial: int = 1000) -> None:
        """Measure the trials before that one, or until the job is tuned."""
        while (trial := self._tuner.open_trial(JOB)) and trial.index < until_trial:
            steps = self._ranks.run(trial.configuration, 10)
            observations = [
                Observation(step, tuple(seconds), tuple(_computing(seconds)))
                for step, seconds in steps
            ]
            self._tuner.observe(JOB, trial.index, observations)

    def end(self) -> None:
        self._tuner.take_event(JOB, Event("ended"))

    def close(self) -> None:
        self._tuner.store.close()


def _computing(seconds: Sequence[float]) -> list[float]:
    return [(0.8 if rank == SLOW_RANK else 0.5) * value for rank, value in enumerate(seconds)]
