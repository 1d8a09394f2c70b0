"""The lists of ``/api/v2`` in pages: ``limit`` and ``after`` of a query, ``next`` of its answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from flask import abort, request

from bagua_autotune.api import messages, views
from bagua_autotune.api.problems import query_number
from bagua_autotune.model.job import LONGEST_NAME
from bagua_autotune.store.reports import ObservationKey
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views import Overviews

Item = TypeVar("Item")
# So long are pages if nobody says otherwise, and at most.
MOST_LISTED = 10_000
# An observation has one value of each rank; so many are held in memory at most.
MOST_VALUES = 1_000_000
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def job_list(overviews: Overviews) -> messages.JobList:
    """Newest first."""
    limit = query_number("limit", 1, messages.MOST_JOBS_LISTED) or 100
    after = request.args.get("after")
    if after is not None and not JOB_ID.fullmatch(after):
        abort(422, "after: must be a job's id, such as an answer's next.")
    name = request.args.get("name")
    if name is not None and not (name.isprintable() and len(name) <= LONGEST_NAME):
        abort(422, f"name: must be printable and of at most {LONGEST_NAME} characters.")
    found, following = overviews.page(name, limit, after)
    jobs = [messages.JobSummary.model_validate(summary) for summary in found]
    return messages.JobList(jobs=jobs, next=following)


def trial_list(tuner: Tuner, job_id: str) -> messages.TrialList:
    """In the order of their indices."""
    limit, (after,) = _limit(), _after(r"([0-9]{1,10})", "a trial's index") or (-1,)
    later = [trial for trial in tuner.trials(job_id) if trial.index > after]
    page, following = _page(later, limit, lambda trial: str(trial.index))
    trials = [messages.Trial.model_validate(trial) for trial in page]
    return messages.TrialList(trials=trials, next=following)


def observation_list(tuner: Tuner, job_id: str) -> messages.ObservationList:
    """In the order of trials and steps."""
    index = query_number("trial", 0, 2**31 - 1)
    told = _after(r"([0-9]{1,10})\.([0-9]{1,16})", "TRIAL.STEP")
    after = ObservationKey(*told) if told else None
    limit = min(_limit(), max(1, MOST_VALUES // tuner.store.job(job_id).world_size))
    found = tuner.store.observations(job_id, index, after, limit + 1)
    page, following = _page(found, limit, lambda pair: f"{pair[0]}.{pair[1].step}")
    observations = [views.observation(trial, step) for trial, step in page]
    return messages.ObservationList(observations=observations, next=following)


def event_list(tuner: Tuner, job_id: str) -> messages.EventList:
    """Oldest first."""
    limit, (after,) = _limit(), _after(r"([0-9]{1,18})", "a number") or (0,)
    found = tuner.store.events_after(job_id, after, limit + 1)
    page, following = _page(found, limit, lambda pair: str(pair[0]))
    events = [messages.Event.model_validate(event) for _, event in page]
    return messages.EventList(events=events, next=following)


def _limit() -> int:
    return query_number("limit", 1, MOST_LISTED) or MOST_LISTED


def _after(pattern: str, what: str) -> tuple[int, ...] | None:
    """The numbers of the query's ``after``; aborts with 422 if they are none."""
    text = request.args.get("after")
    if text is None:
        return None
    found = re.fullmatch(pattern, text, re.ASCII)
    if found is None:
        abort(422, f"after: must be {what}, such as an answer's next.")
    return tuple(int(number) for number in found.groups())


def _page(
    found: list[Item], limit: int, key: Callable[[Item], str]
) -> tuple[list[Item], str | None]:
    """The first ones, and the key of the last of them if there are more."""
    page = found[:limit]
    return page, key(page[-1]) if len(found) > limit else None
