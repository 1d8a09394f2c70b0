"""What is known of a job besides its trials' costs: candidates and the fitted cost model, of which
an earlier job may have left parts."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from functools import lru_cache
from statistics import median

from bagua_autotune.costs import (
    Cost,
    CostModel,
    Costs,
    Kind,
    Layouts,
    Predictor,
    Recomputing,
    RecomputingModel,
    ShardedModel,
    fit_model,
    is_sharded,
    kinds_of,
)
from bagua_autotune.earlier.restart import told_before
from bagua_autotune.measuring.rounds import LATEST_STEPS, TRIAL_STEPS, Round, paces
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.knobs import Partition
from bagua_autotune.search import Problem
from bagua_autotune.search.candidates import (
    enumerate_candidates,
    explicit_candidates,
    travels_in_stripes,
)
from bagua_autotune.store import Store
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor
from bagua_wire.knobs import PARTITION_KNOB, RECOMPUTED_KNOB
from bagua_wire.profile import Profile

logger = logging.getLogger(__name__)

JOBS_REMEMBERED = 64
LONGEST_HORIZON_TRIALS = 200.0


Known = tuple[Sequence[float] | None, Costs]
"""Ready seconds and costs from before this round; what is missing is not known."""


class Knowledge:
    """Reads it from the store; keeps nothing that could not be read again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # They never change and take long to cut; an id may be used again once it is pruned.
        self._fixed = lru_cache(maxsize=JOBS_REMEMBERED)(self._enumerate)
        self._known = lru_cache(maxsize=JOBS_REMEMBERED)(self._find_known)
        self._learned = lru_cache(maxsize=JOBS_REMEMBERED)(self._find_learned)

    def tensors(self, job: Job) -> Sequence[Tensor]:
        """The job's tensors, in gradient-ready order."""
        return self.layouts(job).tensors

    def layouts(self, job: Job) -> Layouts:
        """Cuts the job's tensors."""
        return self._fixed(job.id, job.created_at)[1]

    def problem(self, round_: Round) -> Problem:
        """What is to be searched in this round."""
        job = round_.job
        candidates, layouts = self._fixed(job.id, job.created_at)
        told = told_before(round_) + [t.configuration for t in round_.trials]
        model = self._fit(round_, told)
        lists = list(dict.fromkeys(c for c in told if c.get(PARTITION_KNOB)))
        of_buckets = model.model if isinstance(model, RecomputingModel) else model
        if isinstance(of_buckets, CostModel) and _offers_lists(job, told):
            # One for each way to reduce: with every fit the list changes a little.
            own = [c for c in lists if c != round_.stored_best]
            tried = {configuration.get("hierarchical") for configuration in own}
            new = explicit_candidates(
                job.space, _least_recomputed(round_), candidates, layouts, of_buckets
            )
            lists += [c for c in new if c.get("hierarchical") not in tried and c not in lists]
        # What a training names need be none of them, and may be the best.
        known = set(candidates)
        named = dict.fromkeys(c for c in told if c not in known and not c.get(PARTITION_KNOB))
        remaining = job.limits.remaining_steps / TRIAL_STEPS
        return Problem(
            space=job.space,
            candidates=(*candidates, *named, *lists) if named or lists else candidates,
            layouts=layouts,
            # Seeded by what is tuned: another replica, or a restarted one, decides the same.
            seed=zlib.crc32(job.fingerprint.encode()),
            predictor=model,
            horizon_trials=min(remaining, LONGEST_HORIZON_TRIALS),
            without=lambda index: self._fit(round_, told, without=index),
        )

    def fit_whole(self, job: Job) -> CostModel | None:
        """The cost model from the latest round that was profiled, for jobs that are like it."""
        return self._fit_before(job.id, job.created_at, job.round + 1)

    def learned(self, job: Job) -> Known:
        """What the job leaves to others: what it found itself, or else had from others."""
        return self._learned(job.id, job.created_at, job.revision)

    def _fit(
        self, round_: Round, told: Sequence[Configuration], without: int | None = None
    ) -> Predictor | None:
        """The cost model of this round; the search goes on without one if it cannot be fitted.

        Args:
            without: index of a trial from which nothing is learned.
        """
        job = round_.job
        candidates, layouts = self._fixed(job.id, job.created_at)
        own = [trial for trial in round_.visits.undisturbed if trial.index != without]
        profiled = _profiled_in(self._store.profiles.of(job.id), own)
        line = self._recomputing(round_, own)
        profiled = line.by_default(profiled) if line else profiled
        try:
            if is_sharded(profiled):
                model: CostModel | ShardedModel | None = ShardedModel(layouts, profiled)
            else:
                known = self._known(job.id, job.created_at, round_.number)
                kinds = kinds_of(job.space, (*candidates[:1], *told))
                model = fit_model(layouts, kinds, profiled, *known)
            return RecomputingModel(line, model) if line else model
        except Exception:
            logger.exception("job %s: no cost model can be fitted to its profiles", job.id)
            return None

    def _recomputing(self, round_: Round, trials: Sequence[Trial]) -> Recomputing | None:
        """What recomputing takes in these trials of a round; None where it is not tuned."""
        job, computed = round_.job, []
        for trial in trials if RECOMPUTED_KNOB in job.baseline else ():
            seconds = trial.estimate and round_.objective.seconds(trial.estimate.center)
            told = paces(self._store.observations.latest(job.id, trial.index, LATEST_STEPS))
            if told:
                seconds = median(computing for _, computing in told)
            if seconds:
                computed.append((trial.configuration, seconds))
        return Recomputing.of(job.baseline, computed)

    def _enumerate(
        self, job_id: str, _created_at: float
    ) -> tuple[tuple[Configuration, ...], Layouts]:
        job, tensors = self._store.jobs.get(job_id), self._store.jobs.tensors(job_id)
        is_striped = travels_in_stripes(job.software)
        candidates = enumerate_candidates(job.space, job.baseline, tensors, is_striped)
        return candidates, Layouts(tensors)

    def _find_known(self, job_id: str, created_at: float, number: int) -> Known:
        """What the rounds before this one, or jobs before this one, had learned."""
        model = self._fit_before(job_id, created_at, number)
        if model:
            return tuple(model.ready_seconds), model.costs
        return _inherited(self._store.jobs.get(job_id))

    def _find_learned(self, job_id: str, _created_at: float, _revision: int) -> Known:
        job = self._store.jobs.get(job_id)
        model = self.fit_whole(job)
        return (tuple(model.ready_seconds), model.costs) if model else _inherited(job)

    def _fit_before(self, job_id: str, created_at: float, number: int) -> CostModel | None:
        """The cost model of the latest profiled round before this one."""
        trials, profiles = self._store.trials.of(job_id), self._store.profiles.of(job_id)
        if not profiles:
            return None
        _, layouts = self._fixed(job_id, created_at)
        for earlier in reversed(range(number)):
            own = Visits([trial for trial in trials if trial.round == earlier])
            profiled = _profiled_in(profiles, own.undisturbed)
            if is_sharded(profiled):  # What it gathers is learned anew in every round.
                return None
            kinds = list(dict.fromkeys(Kind.of(configuration) for configuration, _ in profiled))
            model = fit_model(layouts, kinds, profiled)
            if model:
                return model
        return None


def _inherited(job: Job) -> Known:
    if job.inherited is None:
        return None, {}
    costs = {Kind.parse(kind): Cost(*cost) for kind, cost in job.inherited.costs.items()}
    return job.inherited.ready_seconds, costs


def _least_recomputed(round_: Round) -> Configuration:
    """The default, with as few blocks recomputed as were measured."""
    baseline = round_.job.baseline
    if RECOMPUTED_KNOB not in baseline:
        return baseline
    measured = [baseline, *(trial.configuration for trial in round_.trials if trial.estimate)]
    least = min(each.number(RECOMPUTED_KNOB) for each in measured)
    return Configuration({**baseline, RECOMPUTED_KNOB: least})


def _profiled_in(
    profiles: Sequence[tuple[int, Profile]], trials: Sequence[Trial]
) -> list[tuple[Configuration, Profile]]:
    by_index = {trial.index: trial.configuration for trial in trials}
    return [(by_index[index], profile) for index, profile in profiles if index in by_index]


def _offers_lists(job: Job, told: Sequence[Configuration]) -> bool:
    return isinstance(job.space.get(PARTITION_KNOB), Partition) and len(set(told)) > 1
