"""What is stored of a job: in full, its lists in pages, and for other tools as CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from pydantic import TypeAdapter

from bagua_autotune.measuring.rounds import Ceiling, Round, read_ceilings, with_ceiling
from bagua_autotune.measuring.standing import best_trial
from bagua_autotune.model import job as records
from bagua_autotune.model.job import Api, Event, Job, Limits, Purpose, TrialState
from bagua_autotune.model.knobs import ConfigurationField, Knob
from bagua_autotune.model.received import TrialProfile
from bagua_autotune.model.text import clean
from bagua_autotune.model.view import Moment, View
from bagua_autotune.store import Store
from bagua_autotune.tuning.status import JobState, job_state
from bagua_autotune.views.reading import Reading
from bagua_wire.configuration import FILE_FORMAT, Configuration, described
from bagua_wire.cutting import Tensor
from bagua_wire.words import describe


class TrialView(View):
    """``seconds`` per step with its 95 % interval; null where there is none (yet).

    ``speedup``: of this trial alone, over the default measured beside it, which is on the line
    between the default's trials before and after it, or else its nearest one; 1 of the default;
    null where it is more than is possible, see Figures.ceiling.
    ``failure``: why it failed or is infeasible. ``peak_bytes``: the memory that it took on the
    fullest rank, or would take if it is infeasible, of ``device_bytes``; null where the ranks do
    not tell.
    """

    index: int
    round: int
    purpose: Purpose
    state: TrialState
    configuration: ConfigurationField
    steps: int
    outliers: int
    seconds: float | None
    low: float | None
    high: float | None
    speedup: float | None
    started_at: Moment | None
    ended_at: Moment | None
    failure: str | None
    peak_bytes: int | None
    device_bytes: int | None


class ShownTrial(TrialView):
    """``is_best``: the first trial of what was kept, or else of the best configuration so far.

    ``words``: its configuration. ``is_noise``: its speed-up is not told, as it is more than hiding
    all communication would give.
    """

    words: str
    is_best: bool
    is_noise: bool = False


def trial_views(
    job: Job, trials: Sequence[records.Trial], ceilings: Mapping[int, Ceiling | None]
) -> list[TrialView]:
    """Return the trials as views, in the same order.

    Args:
        trials: of all rounds.
        ceilings: of the rounds, by their numbers.
    """
    rounds = [
        replace(Round.of(job, trials, number), ceiling=ceilings.get(number))
        for number in range(job.round + 1)
    ]
    return [_view(rounds[trial.round], trial) for trial in trials]


def shown_trials(reading: Reading) -> list[ShownTrial]:
    """The trials of a job, each with whether it is the best, or too good to be true."""
    best = best_trial(reading.shown)
    return [
        ShownTrial(
            **vars(view),
            words=describe(view.configuration),
            is_best=best is not None and view.index == best.index,
            is_noise=bool(view.speedup is None and view.steps and reading.ceilings.get(view.round)),
        )
        for view in trial_views(reading.job, reading.trials, reading.ceilings)
    ]


def _view(round_: Round, trial: records.Trial) -> TrialView:
    objective, found = round_.objective, trial.estimate
    is_bounded = found is not None and found.count > 1
    compared = round_.defaults.compare([trial])
    faster = round_.believable(compared.speedup(objective)) if compared else None
    return TrialView(
        index=trial.index,
        round=trial.round,
        purpose=trial.purpose,
        state=trial.state,
        configuration=trial.configuration,
        steps=found.count + found.outliers if found else 0,
        outliers=found.outliers if found else 0,
        seconds=objective.seconds(found.center) if found else None,
        low=objective.seconds(found.low) if found and is_bounded else None,
        high=objective.seconds(found.high) if found and is_bounded else None,
        speedup=faster.center if faster else None,
        started_at=trial.started_at,
        ended_at=trial.ended_at,
        failure=trial.failure,
        peak_bytes=trial.memory.peak_bytes if trial.memory else None,
        device_bytes=trial.memory.device_bytes if trial.memory else None,
    )


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


# A step of a thousand ranks is a line of 40 KB.
LINES_AT_ONCE = 100


def trials_csv(knobs: Iterable[str], trials: Sequence[TrialView]) -> str:
    """A header, and one line for each trial. The knobs are columns after its index."""
    rest = [name for name in TrialView.model_fields if name not in ("index", "configuration")]
    text = io.StringIO()
    columns = ["index", *knobs, *rest]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        row = {**trial.model_dump(mode="json"), **trial.configuration}
        writer.writerow({column: _cell(row[column]) for column in columns})
    return text.getvalue()


def _cell(value: object) -> object:
    """Return the value, escaped where a spreadsheet would take others' text for a formula."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def job_json(
    job: JobDetail,
    trials: Sequence[TrialView],
    observations: Iterable[ObservationView],
    events: Sequence[Event],
) -> Iterator[str]:
    """Everything stored of the job except its profiles, in parts.

    Each tensor, trial, observation and event is one line.
    """
    yield job.model_dump_json(indent=2, exclude={"tensors"}).removesuffix("\n}")
    lists: tuple[tuple[str, type, Iterable[object]], ...] = (
        ("tensors", Tensor, job.tensors),
        ("trials", TrialView, trials),
        ("observations", ObservationView, observations),
        ("events", Event, events),
    )
    for name, kind, items in lists:
        yield f',\n  "{name}": ['
        adapter: TypeAdapter[object] = TypeAdapter(kind)
        lines = (f"\n    {adapter.dump_json(item).decode()}" for item in items)
        yield next(lines, "")
        while part := "".join(f",{line}" for line in islice(lines, LINES_AT_ONCE)):
            yield part
        yield "\n  ]"
    yield "\n}\n"


def configuration_json(job: JobDetail, configuration: Configuration) -> str:
    """A configuration as BAGUA_CONFIGURATION reads it, and the job that it was found for."""
    document = {
        "format": FILE_FORMAT,
        "job": job.name,
        "job_id": job.id,
        "configuration": dict(configuration),
        "tensors": described(job.tensors),
        "ranks_per_node": list(job.ranks_per_node),
        "software": job.software,
        "summary": job.result.summary if job.result else "",
    }
    return json.dumps(document, indent=2) + "\n"
