"""The tuner: takes in what the ranks tell of a job and says what they shall run.

Both HTTP protocols stand on it. What takes long, deciding what follows, is done beside the requests
(see background).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bagua_autotune.deciding.decision import FEWEST_REMAINING_STEPS
from bagua_autotune.deciding.next_step import NextStep
from bagua_autotune.deciding.result import (
    allowed_steps,
    give_up,
    is_about_winner,
    refusal,
    spent_steps,
    winner_tried_again,
)
from bagua_autotune.earlier.heritage import inherit, model_key, network_key
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.earlier.restart import describe_inherited
from bagua_autotune.measuring.against_default import OBJECTIVES
from bagua_autotune.measuring.rounds import Round, with_ceiling
from bagua_autotune.model.job import (
    CONTACT_SECONDS,
    Api,
    Event,
    Inherited,
    Job,
    JobSpec,
    Observation,
    Trial,
)
from bagua_autotune.model.reasons import GIVING_UP, INFEASIBLE_CODE, NO_REASON
from bagua_autotune.model.received import Memory
from bagua_autotune.model.statistics import Estimate, estimate
from bagua_autotune.model.text import clean
from bagua_autotune.store import Store
from bagua_autotune.store.claims import is_in_force
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.jobs import Contact
from bagua_autotune.tuning.background import (
    Ahead,
    AtOnce,
    Background,
    Decisions,
    Failed,
    Measured,
    TunerListener,
)
from bagua_autotune.tuning.cache import Cache
from bagua_autotune.tuning.lost_jobs import Leases, goes_on_with
from bagua_autotune.tuning.status import (
    JobState,
    WrongStep,
    check_protocol,
    job_state,
    saved_until,
    weigh,
)
from bagua_wire.configuration import Configuration
from bagua_wire.messages import BEING_TUNED
from bagua_wire.profile import Profile
from bagua_wire.words import describe

logger = logging.getLogger(__name__)

# Of a model with very many tensors the first trials' profiles are enough, and large.
MOST_READY_TIMES = 500_000
STATUSES_KEPT = 1024


class TrialNotNamed(Exception):
    """The ranks disagreed on a trial, and do not say which."""


class Tuner:
    """Registers jobs, takes observations and events, proposes trials, finishes jobs.

    Methods raise UnknownJob and UnknownTrial of the store.

    Args:
        store: where everything is kept; the tuner itself keeps nothing.
        searcher: name of the search method, see bagua_autotune.search.
        listeners: are told of measured trials and decisions; a protocol adds its own.
        clock: seconds since the epoch.
        background: where decisions on measured trials are made.
    """

    def __init__(
        self,
        store: Store,
        searcher: str = "bayesian",
        listeners: Sequence[TunerListener] = (),
        clock: Callable[[], float] = time.time,
        background: Background = AtOnce(),  # noqa: B008  (it has no state)
    ) -> None:
        self.store = store
        self.leases = Leases(store, clock)
        self.listeners = [*listeners]
        self._clock = clock
        self.knowledge = Knowledge(store)
        self._next = NextStep(store, searcher, self.knowledge, clock)
        self._decisions = Decisions(store, self._next, self.listeners, clock, background)
        # Who polls reads one row.
        self._states: Cache[JobState] = Cache(STATUSES_KEPT)

    def register(
        self, job_id: str, spec: JobSpec, protocol: Api = "v2", data: dict[str, Any] | None = None
    ) -> bool:
        """Register a job, or resume an ended one. True if it is new.

        Raises:
            JobConflict: it exists with other content.
        """
        self.leases.look()
        now = self._clock()
        inherited = self._inherit(job_id, spec) if protocol == "v2" else None
        is_new = self.store.jobs.create(
            job_id,
            spec,
            at=now,
            protocol=protocol,
            data=data,
            first=_first_trial(spec),
            inherited=inherited,
            model_key=model_key(spec),
            network_key=network_key(spec),
        )
        if is_new:
            logger.info(
                "job %s (%s): registered, %d ranks, %d tensors, default %s",
                *(job_id, spec.name, spec.world_size, len(spec.tensors)),
                describe(spec.default_configuration),
            )
            for note in describe_inherited(inherited) if inherited else ():
                self.store.events.add(job_id, Event("note", message=note, at=now))
                logger.info("job %s: %s", job_id, note)
            if protocol == "v2" and not spec.fresh:
                self._continue(job_id, model_key(spec))
        else:
            self.store.jobs.resume(job_id, now)
        self._met(self.store.jobs.get(job_id))
        self.ask(job_id)
        return is_new

    def _inherit(self, job_id: str, spec: JobSpec) -> Inherited | None:
        """What a new job takes over; nothing of earlier jobs keeps it from being registered."""
        try:
            self.store.jobs.get(job_id)
        except UnknownJob:
            pass
        else:
            return None
        try:
            return inherit(spec, self.store, self.knowledge)
        except Exception:
            logger.exception("job %s: begins without what earlier jobs found", job_id)
            return None

    def _continue(self, job_id: str, model_key: str) -> None:
        """Continue a training's earlier life in its new job, if there was one."""
        previous = goes_on_with(self.store, self.store.jobs.get(job_id), model_key)
        if previous is not None and self.store.lives.join(previous, job_id):
            over = Event(
                "ended", message=f"the training continues as job {job_id}", at=self._clock()
            )
            self.store.jobs.end_gone([previous], over)
            logger.info("job %s: another life of job %s", job_id, previous)

    def observe(
        self,
        job_id: str,
        index: int,
        observations: Sequence[Observation],
        memory: Memory | None = None,
    ) -> JobState:
        """Take in steps of a trial, and the memory that it took until then; what the ranks shall
        run now. Without steps: a poll.

        Raises:
            WrongStep: a step without exactly one value of each rank.
            OtherProtocol: the job's ranks report otherwise.
        """
        if not observations:
            return self._polled(job_id)
        weighed = partial(weigh, observations)
        found = self.store.observations.add(
            job_id, index, observations, self._clock(), weighed, memory
        )
        job, trials = self._met(found.job), found.trials
        if found.new:
            for listener in self.listeners:
                listener.on_observed(job, found.new)
        deciding, current = self.is_deciding(job_id), trials[index]
        is_last = current is trials[-1]  # else its ranks go on already, and it is closed later
        if deciding or job.is_over or not (is_last and current.is_open):
            return self._state(job, trials, deciding)
        estimated = self._next.estimate(Round.of(job, trials), current, found.costs)
        if estimated is None:
            return self._state(job, trials)
        self._decisions.start(job_id, Measured(index, estimated))
        return self.status(job_id)

    def _polled(self, job_id: str) -> JobState:
        contact, status = self._look(job_id)
        now = self._clock()
        if now - contact.last_contact_at >= CONTACT_SECONDS:
            self._heard_of(job_id)
            self.store.jobs.touch(job_id, now)
            status = self.status(job_id)
        return self._with_what_was_left(status)

    def take_profile(self, job_id: str, index: int, profile: Profile) -> None:
        """Take in a profiled step of a trial; one more than enough is not kept.

        Raises:
            WrongStep: not exactly one ready time of each tensor, or more buckets than tensors where
                none is gathered: only a sharded model's micro-batches are recorded as one step.
        """
        job = self._heard_of(job_id)
        tensors = len(self.knowledge.tensors(job))
        if len(profile.ready_seconds) != tensors:
            raise WrongStep(
                f"ready_seconds has {len(profile.ready_seconds)} values, "
                f"the job has {tensors} tensors"
            )
        if len(profile.buckets) > tensors and not profile.gathers:
            raise WrongStep(
                f"buckets: {len(profile.buckets)} are more than the job's {tensors} tensors"
            )
        trials = Round.of(job, self.store.trials.of(job_id)).trials
        if tensors * len(trials) <= MOST_READY_TIMES:
            self.store.profiles.add(job_id, index, profile, self._clock())

    def take_progress(self, job_id: str, step: int, step_seconds: float) -> JobState:
        """Take in how far a tuned job is, and what its speed-up saved since it last told (see
        saved_until)."""
        job = self._heard_of(job_id)
        observed = self.store.observations.steps(job_id).values()
        saved = saved_until(job, step, step_seconds, observed)
        if saved is None:
            return self._polled(job_id)
        if self.store.jobs.count_saved(job_id, saved, self._clock()):
            for listener in self.listeners:
                listener.on_saved(job, saved.seconds)
        return self.ask(job_id)

    def close_trial(
        self, job_id: str, index: int, values: Sequence[Observation] | None = None
    ) -> bool:
        """Close this trial now and move on, whatever measurement would say.

        For protocols that close trials themselves.

        Args:
            values: what to estimate from; by default all observations of the trial.

        Returns:
            False if the trial is not the open one, or was never observed.
        """
        if values is None:
            values = [observation for _, observation in self.store.observations.of(job_id, index)]
        current = self.open_trial(job_id)
        if not values or current is None or current.index != index:
            return False
        found = self._estimate(self.store.jobs.get(job_id), values)
        self._decisions.start(job_id, Measured(index, found))
        return True

    def reestimate(self, job_id: str, index: int, values: Sequence[Observation]) -> None:
        """Estimate a measured trial anew, after observations that came late."""
        if values:
            found = self._estimate(self.store.jobs.get(job_id), values)
            self.store.trials.update_estimate(job_id, index, found)

    def take_event(self, job_id: str, event: Event, memory: Memory | None = None) -> None:
        """Take in an event; its time is set here.

        Args:
            memory: that an infeasible trial took, or would have taken.

        Raises:
            TrialNotNamed: the event is a disagreement and names no trial, though the job is tuned.
        """
        now = self._clock()
        job = self._heard_of(job_id)
        if event.kind == "disagreement" and event.trial is None and not job.is_over:
            raise TrialNotNamed("a disagreement must name its trial while the job is being tuned")
        if event.trial is not None and event.kind == "switched":
            self.store.trials.start(job_id, event.trial, now)
            if not job.is_over:
                self._decisions.start(job_id, Ahead(event.trial))
        elif event.trial is not None:
            self.store.trials.get(job_id, event.trial)
        told_at = self.store.events.add(job_id, replace(event, at=now))
        if event.kind == "ended":
            self.store.jobs.end(job_id, now)
            logger.info("job %s: training ended", job_id)
        elif told_at is not None and told_at < (job.finished_at or 0.0):
            return  # it was told before, and acted upon before the job was finished
        elif event.kind in GIVING_UP:
            self._give_up(job, event, memory)
        elif event.kind == "drift":
            self._take_drift(job, event)

    def _give_up(self, job: Job, event: Event, memory: Memory | None) -> None:
        """The ranks do not run a trial, or no longer what they ran."""
        what, code = GIVING_UP[event.kind]
        reason = clean(event.message) or NO_REASON
        level = logging.INFO if code == INFEASIBLE_CODE else logging.ERROR
        logger.log(level, "job %s: %s: %s", job.id, what, reason)
        index = event.trial
        if index is None and not job.is_over:
            index = winner_tried_again(job, self.store.trials.of(job.id))
        if index is not None and not job.is_over:
            self._decisions.give_up(job.id, Failed.of(index, event, memory))
        elif job.result and job.result.kept == "winner":
            trials = self.store.trials.of(job.id)
            if is_about_winner(job.result, job, event, trials):
                given_up = give_up(job.result, job, event.kind, reason, len(trials))
                self.store.jobs.replace_result(job.id, *given_up)

    def _take_drift(self, job: Job, event: Event) -> None:
        """Tune the job again, from what is known, unless that happens too often."""
        reason = clean(event.message) or "the step times changed"
        if job.phase != "finished":
            self.ask(job.id)  # the round was opened, but its first trial was not proposed
            return
        trials, observed = self.store.trials.of(job.id), self.store.observations.steps(job.id)
        spent = spent_steps(job, trials, observed, self.store.events.switch_seconds(job.id))
        allowed = allowed_steps(observed, event.step)
        refused = refusal(job, spent, allowed)
        if refused is not None:
            logger.info("job %s: %s; not tuned again: %s", job.id, reason, refused)
        elif self.store.jobs.open_round(job.id, self._clock()):
            logger.info("job %s: %s; tuning again, round %d", job.id, reason, job.round + 1)
            for listener in self.listeners:
                listener.on_round(job)
            self._decisions.start(job.id)

    def _heard_of(self, job_id: str) -> Job:
        """The job, whose ranks speak; OtherProtocol if they should not in this way."""
        job = self.store.jobs.get(job_id)
        check_protocol(job)
        return self._met(job)

    def _met(self, job: Job) -> Job:
        """A job whose ranks spoke; one that was only taken for gone goes on."""
        for listener in self.listeners:
            listener.on_heard(job.id)
        return self.leases.heard(job)

    def open_trial(self, job_id: str) -> Trial | None:
        """The trial that the ranks shall run now; None once the job is finished."""
        trials = self.store.trials.of(job_id)
        return trials[-1] if trials and trials[-1].is_open else None

    def ask(self, job_id: str) -> JobState:
        """The trial that the ranks shall run now."""
        return self._with_what_was_left(self.status(job_id))

    def _with_what_was_left(self, status: JobState) -> JobState:
        """The state, once what a service that is gone left undecided is begun."""
        if status.trial is None and status.state in BEING_TUNED and not status.deciding:
            self._decisions.start(status.id)
            return self.status(status.id)
        return status

    def status(self, job_id: str) -> JobState:
        """Return where the job stands; changes nothing, and mostly reads one row."""
        return self._look(job_id)[1]

    def _look(self, job_id: str) -> tuple[Contact, JobState]:
        # Asked first: what is decided meanwhile then shows as an open trial that is about to end.
        deciding = self.is_deciding(job_id)
        contact, claimed_until = self.store.jobs.contact_and_claim(job_id)
        is_claimed = claimed_until is not None and is_in_force(claimed_until, self._clock())
        state = self._states.get(job_id, contact.version, lambda: self._read_state(job_id))
        return contact, state.model_copy(update={"deciding": deciding or is_claimed})

    def _read_state(self, job_id: str) -> JobState:
        with self.store.database.reading():
            return self._state(self.store.jobs.get(job_id), self.store.trials.of(job_id))

    def _state(self, job: Job, trials: Sequence[Trial], deciding: bool = False) -> JobState:
        ceiling = with_ceiling(self.store, Round.shown(job, trials)).ceiling
        return job_state(job, trials, ceiling, deciding)

    def is_deciding(self, job_id: str) -> bool:
        """Whether this process decides what follows in the job, or will do so soon."""
        return self._decisions.is_busy(job_id)

    def _estimate(self, job: Job, observations: Sequence[Observation]) -> Estimate:
        objective = OBJECTIVES[job.protocol]
        return estimate([objective.cost(observation.values) for observation in observations])


def _first_trial(spec: JobSpec) -> Trial | None:
    """The default, whatever follows; none where nothing will."""
    if spec.limits.remaining_steps < FEWEST_REMAINING_STEPS:
        return None
    return Trial(0, "search", Configuration(spec.default_configuration))
