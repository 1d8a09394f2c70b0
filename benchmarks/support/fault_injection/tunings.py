"""Tunings of simulated jobs in processes of their own, and what must hold when they have ended.

Also of the store: it has everything that was acknowledged, and is whole.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

from sqlalchemy import select

from bagua_autotune.model.job import Event as ToldEvent
from bagua_autotune.model.job import Observation
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import TrialRow
from bagua_autotune.store.maintenance.checkup import examine
from bagua_autotune.store.observations import MOST_LATE_STEPS
from bagua_client.environment import Environment
from bagua_client.measuring.profiler import Recording
from bagua_client.reporter.inbox import Event, GatheredTimes, RankTimes
from bagua_client.reporter.reporter import Reporter
from bagua_simulator import cases
from bagua_wire.configuration import Configuration
from bagua_wire.profile import Profile
from benchmarks.support.fault_injection.trouble import Report
from benchmarks.support.harness import print_table
from tests.autotune.simulated_job import SWITCH_STEPS, SimulatedJob, truth
from tests.client.listening import logged

PAUSE_SECONDS = 0.002
"""Of a step, that the reporter may come in between."""


class ReportingTuner:
    """What a simulated job says to its tuner goes to the client's own reporter, and so to a real
    service."""

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


MOST_SECONDS = 600.0
LONGEST_CALL_SECONDS = 1.0
"""Of the training thread to the reporter, on a machine whose cores others use, too."""
SERVER_WAIT_SECONDS = 10.0
TOLERANCE = 0.05
# Of their memory the processes share what stands there before them.
PRELOADED = ["bagua_client.reporter.reporter", "bagua_simulator", "bagua_autotune.tuning.tuner"]


@dataclass(frozen=True)
class Books:
    """What was found once all was over.

    Attributes:
        acknowledged: steps and events whose client was told that they were taken.
        lost: those of them that are not in the store, in words.
        damage: the faults that ``bagua-autotune doctor`` finds.
    """

    acknowledged: int
    lost: list[str]
    damage: list[str]


def audit(url: str, reports: Iterable[Report]) -> Books:
    """Compare what was acknowledged with what is in the store; the service has ended."""
    store = Store(url)
    damage = [finding.words for finding in examine(store) if finding.is_fault]
    # A closed trial takes so many late steps; the rest is dropped on purpose.
    query = select(TrialRow.job_id, TrialRow.index).where(TrialRow.late_steps >= MOST_LATE_STEPS)
    full = {tuple(row) for row in store.database.read(query)}
    found: dict[str, set[object]] = {}
    acknowledged, lost = 0, []
    for report in reports:
        if report.job_id not in found:
            found[report.job_id] = _told_of(store, report.job_id)
        is_full = report.kind != "events" and (report.job_id, report.body["trial"]) in full
        for item in _items(report):
            acknowledged += 1
            if item not in found[report.job_id] and not is_full:
                lost.append(f"{report.job_id}: {item}")
    store.close()
    return Books(acknowledged, sorted(set(lost)), damage)


def _items(report: Report) -> list[object]:
    """Each step by its trial and times, each event by what it says."""
    body = report.body
    if report.kind == "events":
        return [(body["kind"], body["trial"], body["step"])]
    return [(body["trial"], step["step"], tuple(step["seconds"])) for step in body["steps"]]


def _told_of(store: Store, job_id: str) -> set[object]:
    steps = {(trial, step.step, step.values) for trial, step in store.observations.of(job_id)}
    return {*steps, *((event.kind, event.trial, event.step) for event in store.events.of(job_id))}


@dataclass(frozen=True)
class Setting:
    """One tuning."""

    number: int
    seed: int
    url: str


@dataclass(frozen=True)
class Ended:
    """How a tuning ended.

    Attributes:
        lost_steps: that were not made, or waited for the service.
        stuck_ranks: that had not ended when they should have long.
        place: the configuration it ended at: "default", or "winner".
        over_best: its true step time over the best one's, minus 1; None: real jobs have no truth.
        reason: the last words of the client on it.
        seconds: from its first step to its last.
    """

    number: int
    problem: str
    lost_steps: int
    stuck_ranks: int
    place: str
    over_best: float | None
    reason: str
    seconds: float

    @property
    def is_right(self) -> bool:
        is_good = self.over_best is None or self.over_best <= TOLERANCE
        has_reason = self.place == "default" and bool(self.reason)
        return not self.lost_steps and not self.stuck_ranks and (is_good or has_reason)


def run(settings: Sequence[Setting], at_once: int) -> Iterator[Ended]:
    """Simulated jobs beside one another. They begin at once; their ends come in the given order."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = ProcessPoolExecutor(at_once, mp_context=context)
    found = processes.map(tune, settings)

    def ends() -> Iterator[Ended]:
        with processes:
            yield from found

    return ends()


def tune(setting: Setting) -> Ended:
    """A simulated job; in a process of its own."""
    named = [each for each in cases() if each.simulator.cluster.nodes == 4]
    problem = named[setting.number % len(named)]
    began = time.monotonic()
    seed = 1000 * setting.seed + setting.number
    with logged() as lines:
        tuner = ReportingTuner(setting.url, SERVER_WAIT_SECONDS)
        job = ServedJob(tuner, problem.simulator, "job", seed, fingerprint=str(seed))
        while not job.is_finished and time.monotonic() - began < MOST_SECONDS:
            job.run(1)
        seconds = time.monotonic() - began
        tuner.reporter.close(5.0)
    best = min(truth(problem.simulator).values())
    return Ended(
        number=setting.number,
        problem=problem.name,
        lost_steps=int(tuner.longest_call_seconds > LONGEST_CALL_SECONDS),
        stuck_ranks=0 if job.is_finished else problem.simulator.cluster.world_size,
        place="default" if job.configuration == job.baseline else "winner",
        over_best=job.true_seconds(job.configuration) / best - 1,
        reason=last_words(lines),
        seconds=seconds,
    )


def last_words(lines: Sequence[str]) -> str:
    told = [line for line in lines if " over the " in line or "is off" in line or "kept" in line]
    return (told or lines or [""])[-1].partition("autotune")[2].lstrip(": ")


def show(ended: Sequence[Ended], books: Books) -> bool:
    """Print what became of each and of all; whether all is right."""
    rows = [
        (
            str(each.number),
            each.problem,
            f"{each.seconds:.0f}",
            each.place,
            "" if each.over_best is None else f"{each.over_best:.1%}",
            "" if each.is_right else "WRONG",
            each.reason[:90],
        )
        for each in ended
    ]
    print_table(("tuning", "problem", "s", "ended at", "over best", "", "last words"), rows)
    within = sum(each.over_best is not None and each.over_best <= TOLERANCE for each in ended)
    figures = {
        "tunings": len(ended),
        "steps lost": sum(each.lost_steps for each in ended),
        "ranks stuck": sum(each.stuck_ranks for each in ended),
        f"simulated, within {TOLERANCE:.0%} of the best": within,
        "of the others not at the default with a reason": sum(not e.is_right for e in ended),
        "acknowledged reports": books.acknowledged,
        "acknowledged and lost": len(books.lost),
        "damage to the store": len(books.damage),
    }
    print_table(("figure", ""), [(name, str(value)) for name, value in figures.items()])
    for line in itertools.islice([*books.lost, *books.damage], 20):
        print(line)
    return all(each.is_right for each in ended) and not books.lost and not books.damage
