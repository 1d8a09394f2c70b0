"""A simulated job whose rank 0 talks to a real service, through the client's own reporter."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from bagua_autotune.model.job import Event as ToldEvent
from bagua_autotune.model.job import Observation
from bagua_client.environment import Environment
from bagua_client.measuring.profiler import Recording
from bagua_client.reporter.inbox import Event, GatheredTimes, RankTimes
from bagua_client.reporter.reporter import Reporter
from bagua_wire.configuration import Configuration
from bagua_wire.profile import Profile
from tests.autotune.simulated_job import SWITCH_STEPS, SimulatedJob

PAUSE_SECONDS = 0.002
"""Of a step, that the reporter may come in between."""


class ReportingTuner:
    """What a simulated job says to its tuner goes to the reporter."""

    def __init__(self, url: str, server_wait_seconds: float) -> None:
        self._environment = Environment(url=url, server_wait_seconds=server_wait_seconds)
        self.reporter: Reporter
        self.longest_call_seconds = 0.0

    def register(self, job_id: str, spec: Any) -> None:
        description = spec.model_dump(mode="json", exclude={"team"})  # the token says that
        self.reporter = Reporter(self._environment, description)

    def observe(self, job_id: str, trial: int | None, steps: Sequence[Observation]) -> None:
        first = steps[0].step
        ranks = range(len(steps[0].values))
        by_rank = [
            RankTimes(
                first,
                [_known(step.values[rank]) for step in steps],
                [_known(step.compute[rank]) for step in steps if step.compute],
            )
            for rank in ranks
        ]
        self._put(GatheredTimes(trial, by_rank))

    def take_profile(self, job_id: str, trial: int, profile: Profile) -> None:
        self._put(_Recorded(trial, profile))

    def take_event(self, job_id: str, event: ToldEvent) -> None:
        self._put(Event(event.kind, event.trial, event.step or 0, event.message, event.seconds))

    def command(self, step: int) -> dict[str, Any] | None:
        self.reporter.look(step)
        text = self.reporter.take_command()
        return None if text is None else dict(json.loads(text))

    def _put(self, message: GatheredTimes | Recording | Event) -> None:
        began = time.perf_counter()
        self.reporter.put(message)
        took = time.perf_counter() - began
        self.longest_call_seconds = max(self.longest_call_seconds, took)


def _known(value: float | None) -> float:
    assert value is not None
    return value


class _Recorded(Recording):
    """One that is known without a device."""

    def __init__(self, trial: int, profile: Profile) -> None:
        order = range(len(profile.ready_seconds))
        for name, value in (("trial", trial), ("order", order), ("_profile", profile)):
            object.__setattr__(self, name, value)

    def read(self) -> Profile:
        profile: Profile = getattr(self, "_profile")  # noqa: B009  (not a field)
        return profile


@dataclass
class ServedJob(SimulatedJob):
    """Its ranks follow the reporter's commands."""

    tuner: ReportingTuner  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._told: Mapping[str, Any] | None = None
        self._after: list[Observation] = []

    @property
    def is_finished(self) -> bool:
        """Whether the ranks run what the tuning ended with, or what they were left with."""
        is_left = self._told is not None and not self._told["watch"]
        return self._watch is not None and (
            is_left or not self.tuner.reporter._conversation.is_tuning
        )

    @property
    def status(self) -> Any:
        assert self._told is not None
        trial = self._told["trial"]
        return SimpleNamespace(
            trial=None if trial is None else SimpleNamespace(index=trial),
            configuration=Configuration(self._told["configuration"]),
        )

    def _run_step(self) -> None:
        super()._run_step()
        if self._watch is not None and self._switch_at is None:
            self._follow()
        time.sleep(PAUSE_SECONDS)

    def _report(self) -> None:
        reported, self._reported = self._reported, []
        if self._trial is not None and reported and self._switch_at is None:
            self.tuner.observe(self.job_id, self._trial, reported)
        self._follow()

    def _follow(self) -> None:
        command = self.tuner.command(self.step) if self._switch_at is None else None
        if command is not None:
            self._told = command
            self._switch_at = self.step + SWITCH_STEPS

    def _switch(self) -> None:
        self._watch = None
        super()._switch()

    def _look(self, watch: Any, seconds: float) -> None:
        self._after.append(Observation(self.step, (seconds,) * self.simulator.cluster.world_size))
        if len(self._after) == SWITCH_STEPS:
            self.tuner.observe(self.job_id, None, self._after)
            self._after = []
