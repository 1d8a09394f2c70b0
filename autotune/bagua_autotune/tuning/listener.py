"""Whoever wants to know what the tuner does."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_autotune.model.job import Job, Observation, Trial


class TunerListener:
    """Is told what the tuner does; override what is of interest."""

    def on_heard(self, job_id: str) -> None:
        """The job's ranks said something to this process."""

    def on_observed(self, job: Job, observations: Sequence[Observation]) -> None:
        """These steps were reported and stored; none of them for the second time."""

    def on_measured(self, job: Job, trial: Trial) -> None:
        """A trial was closed with an estimate."""

    def on_decided(self, seconds: float) -> None:
        """A decision on what follows took so long."""

    def on_superfluous(self) -> None:
        """A decision was not needed: another replica, or a failed trial, had moved the job on."""

    def on_round(self, job: Job) -> None:
        """A finished job is tuned again."""

    def on_failed(self, error: Exception) -> None:
        """A decision beside the requests failed; it is tried again at the next report."""
