"""A simulated job's ranks against the real tuner: steps, reports, switches, the watch after."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bagua_autotune.model.job import Event, JobSpec, Observation
from bagua_autotune.model.knobs import SPACE, Domain
from bagua_autotune.model.received import Memory
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_autotune.tuning.status import JobState
from bagua_autotune.tuning.tuner import Tuner
from bagua_client.agent.report import DROPPED_STEPS, MOST_REDUCTIONS, SHORTEST_SECONDS
from bagua_client.agent.switching import FIRST_REPORT_STEPS
from bagua_client.measuring.profiler import PROFILED_STEPS
from bagua_client.reporter.lasting_change import DriftWatch
from bagua_simulator import Simulator
from bagua_simulator.recomputation import RecomputingSimulator
from bagua_simulator.sharded import ShardedSimulator
from bagua_wire.configuration import Configuration, Value
from bagua_wire.profile import Profile

# As the client does it: a first report soon after a switch, then one from time to time; what the
# service wants goes with the next report, is read a step later, and voted on in the step after.
REPORT_STEPS = 4
VOTE_STEPS = 2
SWITCH_STEPS = 5  # as rivals are charged, all in all
RECUT_STEPS = 0.2
# From when the ranks tell that a trial runs until they know what follows it.
DECISION_SECONDS = 0.1
# Equal devices differ by so much in what they compute.
COMPUTE_SPREAD = 0.01
KNOBS = ("bucket_bytes", "hierarchical", "channels")
Simulated = Simulator | ShardedSimulator | RecomputingSimulator


@dataclass
class Switch:
    """The ranks ran ``configuration`` from ``step`` on; ``trial`` is None at the end."""

    step: int
    trial: int | None
    configuration: Configuration


@dataclass
class SimulatedJob:
    """One job's ranks.

    Attributes:
        simulator: says how long a step takes; may be replaced while the job runs.
        disturbed: by what a step takes longer than that.
        default: the job's own configuration; by default the usual one.
        name: by default its id.
        straggler_probability: of a step in which one rank is late.
        complexity: of the batches that follow, as the training tells it; None: it does not.
        switches: all so far.
        lost_steps: how much longer than at the baseline all steps of tunings took, in steps of
            the baseline's length; what was gained does not count.
    """

    tuner: Tuner
    simulator: Simulated
    job_id: str
    seed: int
    noise: float = 0.05
    knobs: tuple[str, ...] = KNOBS
    fingerprint: str = "simulated"
    limits: Mapping[str, Any] = field(default_factory=dict)
    disturbed: Callable[[int], float] = lambda step: 1.0
    default: Configuration | None = None
    name: str | None = None
    straggler_probability: float = 0.03
    complexity: float | None = None

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)
        self._spread = np.random.default_rng((self.seed, 1))
        self._share: tuple[object, float] = (None, 1.0)  # of a step, that is computing
        self.step = 0
        self.switches: list[Switch] = []
        self.lost_steps = 0.0
        self.drifts: list[int] = []
        self._trial: int | None = None
        self._measured_from = 0
        self._next_report = REPORT_STEPS
        self._reported: list[Observation] = []
        self._profiled = 0
        self._switch_at: int | None = None
        self._watch: DriftWatch | None = None
        self._proven_bytes = 0
        self.refused: list[Configuration] = []
        usual = Configuration({knob: self.simulator.default[knob] for knob in self.knobs})
        self.configuration = self.baseline = self.default or usual
        self.tuner.register(self.job_id, self._spec())

    def run(self, steps: int, until_finished: bool = False) -> None:
        """Train so many steps, or until the tuning has ended."""
        for _ in range(steps):
            self._run_step()
            if until_finished and self.is_finished:
                return

    @property
    def is_finished(self) -> bool:
        """Whether the ranks run what the tuning ended with."""
        return self._watch is not None

    @property
    def status(self) -> JobState:
        return self.tuner.status(self.job_id)

    def true_seconds(self, configuration: Mapping[str, Value]) -> float:
        return self.simulator.step_seconds(configuration)

    def _run_step(self) -> None:
        self.step += 1
        if self._switch_at is not None and self.step >= self._switch_at:
            self._switch()
        seconds = self.simulator.observe(
            self.configuration, self._generator, self.noise, self.straggler_probability
        )
        factor = self.disturbed(self.step)
        seconds = tuple(value * factor for value in seconds)
        if self._watch is not None:
            self._look(self._watch, max(seconds))
            return
        excess = self.true_seconds(self.configuration) / self.true_seconds(self.baseline) - 1
        self.lost_steps += max(0.0, excess)
        if self._trial is not None and self.step >= self._measured_from:
            computing = self._computing(seconds) if len(seconds) > 1 else None
            self._reported.append(Observation(self.step, seconds, computing, self.complexity))
            if self._profiled < PROFILED_STEPS and len(seconds) > 1:
                self._profiled += 1
                self.tuner.take_profile(self.job_id, self._trial, self._profile(factor))
        if self.step >= self._next_report and self._switch_at is None:
            self._next_report = self.step + self._pace
            self._report()

    @property
    def _pace(self) -> int:
        """The steps between two reports."""
        seconds = self.true_seconds(self.configuration)
        return max(1, math.ceil(min(SHORTEST_SECONDS / seconds, MOST_REDUCTIONS)))

    def _profile(self, factor: float) -> Profile:
        """Of this step, which took ``factor`` of what it takes undisturbed."""
        return self.simulator.profile(self.configuration, self.step, self._generator, self.noise)

    def _computing(self, seconds: tuple[float, ...]) -> tuple[float, ...]:
        """Each rank's own, of a step that took so long: until its last gradient is ready, with the
        launches, and with what communication slows computing down by. The slowest rank's decides.
        """
        if self._share[0] != (self.configuration, self.simulator):
            computing_seconds = self.simulator.computing_seconds(self.configuration)
            share = computing_seconds / self.simulator.step_seconds(self.configuration)
            self._share = (self.configuration, self.simulator), share
        spread = self._spread.normal(1.0, COMPUTE_SPREAD, len(seconds))
        spread[np.argmax(seconds)] = spread.max()
        computing = max(seconds) * self._share[1] * spread / spread.max()
        return tuple(min(pair) for pair in zip(computing.tolist(), seconds, strict=True))

    def _report(self) -> None:
        reported, self._reported = self._reported, []
        before = self.tuner.open_trial(self.job_id)
        was_open = before.index if before else None
        if self._trial is not None and reported:
            memory = self._memory(self.configuration)
            self._proven_bytes = max(self._proven_bytes, memory.peak_bytes if memory else 0)
            self.tuner.observe(self.job_id, self._trial, reported, memory)
        trial = self.tuner.open_trial(self.job_id)
        index = trial.index if trial else None
        if self._switch_at is None and (index != self._trial or not self.switches):
            known = was_open == index and self._is_decided
            self._switch_at = self.step + (0 if known else self._pace) + VOTE_STEPS + 1

    def _switch(self) -> None:
        self._switch_at = None
        if self._trial is not None and self._reported:
            self.tuner.observe(self.job_id, self._trial, self._reported)  # late
        status = self.status
        self._trial = status.trial.index if status.trial else None
        if status.trial and not self._fits(status.configuration):
            self._refuse(status.trial.index, status.configuration)
            return
        before, self.configuration = self.configuration, status.configuration
        self.switches.append(Switch(self.step, self._trial, self.configuration))
        self._measured_from = self.step + DROPPED_STEPS
        self._next_report = self._measured_from + FIRST_REPORT_STEPS - 1
        self._reported, self._profiled = [], 0
        recut_seconds = 0.0
        if before != self.configuration:
            recut_seconds = RECUT_STEPS * self.true_seconds(before)
            self.lost_steps += RECUT_STEPS
        if self._trial is None:
            self._watch = DriftWatch()
        else:
            event = Event("switched", self._trial, self.step, "", recut_seconds)
            self.tuner.take_event(self.job_id, event)

    def _memory(self, configuration: Configuration, is_predicted: bool = False) -> Memory | None:
        """What a configuration takes, where the simulator knows."""
        simulator = self.simulator
        if not isinstance(simulator, RecomputingSimulator) or simulator.room is None:
            return None
        room, peak = simulator.room, round(simulator.peak_bytes(configuration))
        limit, device = round(room.limit_bytes), round(room.device_bytes)
        return Memory(
            peak_bytes=peak, limit_bytes=limit, device_bytes=device, is_predicted=is_predicted
        )

    def _fits(self, configuration: Configuration) -> bool:
        simulator = self.simulator
        is_known = isinstance(simulator, RecomputingSimulator)
        return not is_known or simulator.fits(configuration, self._proven_bytes)

    def _refuse(self, trial: int, configuration: Configuration) -> None:
        """The ranks do not try it, and go on with the default."""
        self.refused.append(configuration)
        self._trial, self.configuration = None, self.baseline
        self._next_report = self.step + 1
        told = Event("infeasible", trial, self.step, "no room")
        self.tuner.take_event(self.job_id, told, self._memory(configuration, is_predicted=True))

    @property
    def _is_decided(self) -> bool:
        """Whether the ranks know by now what follows, which is decided from the first step after
        the switch on."""
        since = self.step - (self._measured_from - DROPPED_STEPS)
        return since * self.true_seconds(self.configuration) >= DECISION_SECONDS

    def _look(self, watch: DriftWatch, seconds: float) -> None:
        drift = watch.add(self.step, seconds)
        if drift is None:
            return
        self.drifts.append(self.step)
        message = f"{drift.before_seconds:.3g} s became {drift.now_seconds:.3g} s"
        told = Event("drift", None, self.step, message, drift.now_seconds)
        self.tuner.take_event(self.job_id, told)
        if self.tuner.open_trial(self.job_id) is not None:
            self._watch = None
            self._switch_at = self.step + self._pace + VOTE_STEPS + 1

    def _spec(self) -> JobSpec:
        cluster = self.simulator.cluster
        return JobSpec(
            name=self.name or self.job_id,
            world_size=cluster.world_size,
            ranks_per_node=(cluster.ranks_per_node,) * cluster.nodes,
            tensors=tuple(self.simulator.tensors),
            knobs={knob: self.simulator.space[knob] for knob in self.knobs},
            default_configuration=dict(self.baseline),
            fingerprint=self.fingerprint,
            limits={"warmup_seconds": 0.0, **self.limits},
            # How many nodes there are is said above.
            software={"network": str(hash(replace(cluster, nodes=1)))},
        )


def space_of(simulator: Simulated, knobs: Sequence[str]) -> dict[str, Domain]:
    """The job's knobs of these names, as the service reads them."""
    return SPACE.validate_python({knob: simulator.space[knob] for knob in knobs})


def truth(
    simulator: Simulated,
    default: Configuration | None = None,
    knobs: Sequence[str] = KNOBS,
) -> dict[Configuration, float]:
    """The true step time of every candidate, the baseline first."""
    baseline = default or Configuration({knob: simulator.default[knob] for knob in knobs})
    space = space_of(simulator, knobs)
    candidates = enumerate_candidates(space, baseline, simulator.tensors)
    return {candidate: simulator.step_seconds(candidate) for candidate in candidates}
