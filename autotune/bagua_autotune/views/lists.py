"""What is stored of a job: in full, and its lists in pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from bagua_autotune.measuring.rounds import Round, read_ceilings, with_ceiling
from bagua_autotune.model.job import Api, Event, Limits
from bagua_autotune.model.knobs import ConfigurationField, Knob
from bagua_autotune.model.received import TrialProfile
from bagua_autotune.model.view import Moment, View
from bagua_autotune.store import Store
from bagua_autotune.tuning.status import JobState, job_state
from bagua_autotune.views.trials import TrialView, trial_views
from bagua_wire.cutting import Tensor

# So long are pages if nobody says otherwise, and at most.
MOST_LISTED = 10_000
# An observation has one value of each rank; so many are held in memory at most.
MOST_VALUES = 1_000_000


class JobDetail(JobState):
    """All that is known of a job but its trials.

    ``is_lost``: its ranks did not say that it ended; nothing is heard of them any more. ``run``:
    its launcher's name of the run. ``life``: which one of its training it is; ``continues``: the
    job of the one before.
    """

    world_size: int
    ranks_per_node: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    knobs: dict[str, Knob]
    default_configuration: ConfigurationField
    fingerprint: str
    limits: Limits
    software: dict[str, str]
    protocol: Api
    created_at: Moment
    last_contact_at: Moment
    ended_at: Moment | None
    is_lost: bool
    run: str | None
    life: int
    continues: str | None


class Page(View):
    """A part of a list; ``next``, given as ``after``, gets what follows. Null at the end."""

    next: str | None = None


class TrialList(Page):
    trials: list[TrialView]


class ObservationView(View):
    """``seconds`` by rank; null where a rank did not report, or did not tell what it computed.
    ``complexity``: of the largest batch of a rank; null where the training does not tell.
    """

    trial: int
    step: int
    seconds: tuple[float | None, ...]
    compute_seconds: tuple[float | None, ...] | None
    complexity: float | None


class ObservationList(Page):
    observations: list[ObservationView]


class ProfileList(View):
    profiles: list[TrialProfile]


class EventList(Page):
    events: list[Event]


class WrongPage(ValueError):
    """Raised where no page has this ``next``; the message says what it must be."""


Item = TypeVar("Item")
AnyPage = TypeVar("AnyPage", bound=Page)


def all_pages(read: Callable[[str | None], AnyPage]) -> Iterator[AnyPage]:
    """A whole list.

    Args:
        read: the page behind this one's ``next``; of None the first.
    """
    page = read(None)
    yield page
    while page.next is not None:
        page = read(page.next)
        yield page


def job_detail(store: Store, job_id: str, deciding: bool = False) -> JobDetail:
    """Raises UnknownJob, as all of these do, if there is no such job."""
    with store.database.reading():
        job, trials = store.jobs.get(job_id), store.trials.of(job_id)
        tensors, place = store.jobs.tensors(job_id), store.lives.place_of(job_id)
        ceiling = with_ceiling(store, Round.shown(job, trials)).ceiling
    return JobDetail(
        **vars(job_state(job, trials, ceiling, deciding)),
        world_size=job.world_size,
        ranks_per_node=job.ranks_per_node,
        tensors=tuple(tensors),
        knobs=dict(job.space),
        default_configuration=job.baseline,
        fingerprint=job.fingerprint,
        limits=job.limits,
        software=job.software,
        protocol=job.protocol,
        created_at=job.created_at,
        last_contact_at=job.last_contact_at,
        ended_at=job.ended_at,
        is_lost=job.is_lost,
        run=job.run,
        life=place.number,
        continues=place.previous,
    )


def trial_list(
    store: Store, job_id: str, limit: int = MOST_LISTED, after: str | None = None
) -> TrialList:
    """List a job's trials by index. Raises WrongPage, as all of these do."""
    (last,) = _key(after, r"([0-9]{1,10})", "a trial's index") or (-1,)
    with store.database.reading():
        job, stored = store.jobs.get(job_id), store.trials.of(job_id)
        trials = trial_views(job, stored, read_ceilings(store, job, stored))
    later = [trial for trial in trials if trial.index > last]
    page, following = _cut(later, limit, lambda trial: str(trial.index))
    return TrialList(trials=page, next=following)


def observation_list(
    store: Store,
    job_id: str,
    trial: int | None = None,
    limit: int = MOST_LISTED,
    after: str | None = None,
) -> ObservationList:
    """List the observations of one trial, or of all, in the order of trials and steps."""
    told = _key(after, r"([0-9]{1,10})\.([0-9]{1,16})", "TRIAL.STEP")
    last = (told[0], told[1]) if told else None
    limit = min(limit, max(1, MOST_VALUES // store.jobs.get(job_id).world_size))
    found = store.observations.of(job_id, trial, last, limit + 1)
    page, following = _cut(found, limit, lambda pair: f"{pair[0]}.{pair[1].step}")
    observations = [
        ObservationView(
            trial=index,
            step=step.step,
            seconds=step.values,
            compute_seconds=step.compute,
            complexity=step.complexity,
        )
        for index, step in page
    ]
    return ObservationList(observations=observations, next=following)


def event_list(
    store: Store, job_id: str, limit: int = MOST_LISTED, after: str | None = None
) -> EventList:
    """List the events, oldest first."""
    (last,) = _key(after, r"([0-9]{1,18})", "a number") or (0,)
    found = store.events.after(job_id, last, limit + 1)
    page, following = _cut(found, limit, lambda pair: str(pair[0]))
    return EventList(events=[event for _, event in page], next=following)


def profile_list(store: Store, job_id: str, trial: int | None = None) -> ProfileList:
    """The profiles of one trial, or of all."""
    found = store.profiles.of(job_id, trial)
    profiles = [TrialProfile(trial=index, **vars(profile)) for index, profile in found]
    return ProfileList(profiles=profiles)


def every_trial(store: Store, job_id: str) -> list[TrialView]:
    pages = all_pages(lambda after: trial_list(store, job_id, after=after))
    return [trial for page in pages for trial in page.trials]


def every_observation(store: Store, job_id: str) -> Iterator[ObservationView]:
    """Yield all observations, read page by page: those of a large job would fill the memory."""
    pages = all_pages(lambda after: observation_list(store, job_id, after=after))
    return (observation for page in pages for observation in page.observations)


def every_event(store: Store, job_id: str) -> list[Event]:
    pages = all_pages(lambda after: event_list(store, job_id, after=after))
    return [event for page in pages for event in page.events]


def _key(after: str | None, pattern: str, what: str) -> tuple[int, ...] | None:
    if after is None:
        return None
    found = re.fullmatch(pattern, after, re.ASCII)
    if found is None:
        raise WrongPage(f"after: must be {what}, such as an answer's next.")
    return tuple(int(number) for number in found.groups())


def _cut(
    found: list[Item], limit: int, key: Callable[[Item], str]
) -> tuple[list[Item], str | None]:
    """The first ones, and the key of the last of them if there are more."""
    page = found[:limit]
    return page, key(page[-1]) if len(found) > limit else None
