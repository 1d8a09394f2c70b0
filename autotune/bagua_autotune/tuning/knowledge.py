"""What is known of a job besides its trials' costs: candidates, and the fitted cost model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

from bagua_autotune.costs import Cost, CostModel, Costs, Kind, Layouts, fit_model
from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.knobs import Configuration, Partition
from bagua_autotune.model.profile import Profile
from bagua_autotune.search import Problem
from bagua_autotune.search.candidates import enumerate_candidates, explicit_candidates
from bagua_autotune.store import Store

JOBS_REMEMBERED = 64
# A trial takes about so many steps of the training, those between two trials with it.
TRIAL_STEPS = 16
LONGEST_HORIZON_TRIALS = 200.0
# From fewer profiled trials the costs of small and large buckets cannot be told apart.
FEWEST_PROFILED_FOR_LISTS = 2


Known = tuple[Sequence[float] | None, Costs]
"""Ready seconds and costs from before this round; what is missing is not known."""


class Knowledge:
    """Reads it from the store; keeps nothing that could not be read again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # They never change and take long to cut; an id may be used again once it is pruned.
        self._fixed = lru_cache(maxsize=JOBS_REMEMBERED)(self._enumerate)
        self._before = lru_cache(maxsize=JOBS_REMEMBERED)(self._fit_earlier_rounds)

    def tensors(self, job: Job) -> Sequence[Tensor]:
        """Of the job, in gradient-ready order."""
        return self._fixed(job.id, job.created_at)[1].tensors

    def problem(self, job: Job, trials: Sequence[Trial]) -> Problem:
        """What is to be searched in this round.

        Args:
            trials: all of the job's, of all rounds.
        """
        candidates, layouts = self._fixed(job.id, job.created_at)
        current = [trial for trial in trials if trial.round == job.round]
        profiled = _of_round(self._store.profiles(job.id), trials, job.round)
        explicit = [t.configuration for t in current if t.configuration.get("buckets")]
        kinds = sorted({Kind.of(c) for c in (*candidates, *explicit)}, key=str)
        known = self._before(job.id, job.created_at, job.round) if job.round else _inherited(job)
        model = fit_model(layouts, kinds, profiled, *known)
        listed = list(dict.fromkeys(explicit))
        if model and _offers_lists(job, profiled):
            # One for each way to reduce: with every fit the list changes a little.
            tried = {configuration.get("hierarchical") for configuration in listed}
            new = explicit_candidates(job.space, job.baseline, layouts.tensors, model)
            listed += [c for c in new if c.get("hierarchical") not in tried]
        remaining = max(1, job.limits.remaining_steps) / TRIAL_STEPS
        return Problem(
            space=job.space,
            candidates=(*candidates, *listed) if listed else candidates,
            layouts=layouts,
            # Seeded by what is tuned: another replica, or a restarted one, decides the same.
            seed=zlib.crc32(job.fingerprint.encode()),
            predictor=model,
            horizon_trials=min(remaining, LONGEST_HORIZON_TRIALS),
        )

    def fit(self, job: Job) -> CostModel | None:
        """The cost model of all that was profiled in a job, for jobs that are like it."""
        _, layouts = self._fixed(job.id, job.created_at)
        trials = self._store.trials(job.id)
        latest = max((trial.round for trial in trials), default=0)
        profiled = _of_round(self._store.profiles(job.id), trials, latest)
        kinds = sorted({Kind.of(configuration) for configuration, _ in profiled}, key=str)
        return fit_model(layouts, kinds, profiled)

    def _enumerate(
        self, job_id: str, _created_at: float
    ) -> tuple[tuple[Configuration, ...], Layouts]:
        job, tensors = self._store.job(job_id), self._store.tensors(job_id)
        return enumerate_candidates(job.space, job.baseline, tensors), Layouts(tensors)

    def _fit_earlier_rounds(self, job_id: str, created_at: float, round_: int) -> Known:
        """What the round before this one had learned."""
        _, layouts = self._fixed(job_id, created_at)
        trials, profiles = self._store.trials(job_id), self._store.profiles(job_id)
        for earlier in reversed(range(round_)):
            profiled = _of_round(profiles, trials, earlier)
            kinds = sorted({Kind.of(configuration) for configuration, _ in profiled}, key=str)
            model = fit_model(layouts, kinds, profiled)
            if model:
                return tuple(model.ready_seconds), model.costs
        return _inherited(self._store.job(job_id))


def _inherited(job: Job) -> Known:
    if job.inherited is None:
        return None, {}
    costs = {Kind.parse(kind): Cost(*cost) for kind, cost in job.inherited.costs.items()}
    return job.inherited.ready_seconds, costs


def _of_round(
    profiles: Sequence[tuple[int, Profile]], trials: Sequence[Trial], round_: int
) -> list[tuple[Configuration, Profile]]:
    by_index = {trial.index: trial for trial in trials}
    return [
        (by_index[index].configuration, profile)
        for index, profile in profiles
        if index in by_index and by_index[index].round == round_
    ]


def _offers_lists(job: Job, profiled: Sequence[tuple[Configuration, Profile]]) -> bool:
    if not any(isinstance(domain, Partition) for domain in job.space.values()):
        return False
    return len({configuration for configuration, _ in profiled}) >= FEWEST_PROFILED_FOR_LISTS
