"""Lists and overviews of jobs, and how their tensors are cut: each made once per revision."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from bagua_autotune.costs import Layouts
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import best_trial
from bagua_autotune.model.job import CUT_SHORT, RUNS, Event, Job, Limits, Trial
from bagua_autotune.model.knobs import ConfigurationField, Knob, Space
from bagua_autotune.model.view import View
from bagua_autotune.search import make_searcher
from bagua_autotune.store import Store
from bagua_autotune.store.claims import is_in_force
from bagua_autotune.store.jobs import Contact, read_each
from bagua_autotune.tuning.cache import Cache
from bagua_autotune.views.curve import Curve, closed, make_curve
from bagua_autotune.views.lists import JobDetail, Page, ShownTrial, job_detail, shown_trials
from bagua_autotune.views.reading import LATEST_STEPS, Reading, read
from bagua_autotune.views.steps import (
    BestSoFar,
    RankTime,
    StepSeries,
    Switch,
    best_so_far,
    exposed_seconds,
    rank_times,
    switches,
    thin_out,
)
from bagua_autotune.views.stock import (
    StockSetting,
    has_stock_line,
    stock_ddp_snippet,
    stock_setting,
)
from bagua_autotune.views.summary import (
    LATEST_PROFILES,
    JobSummary,
    Life,
    Summaries,
    make_lives,
    make_summary,
)
from bagua_autotune.views.words import explain, machine_change
from bagua_wire.configuration import Configuration
from bagua_wire.knobs import BUCKET_KNOB
from bagua_wire.words import KNOB_WORDS, describe, words_of

Role = Literal["default", "incumbent"]


class Bucket(View):
    """A bucket: how many tensors it holds, and the first and last in gradient-ready
    order, by name.
    """

    bytes: int
    tensors: int
    first: str
    last: str


class BucketLayout(View):
    role: Role
    words: str
    buckets: list[Bucket]


class JobBuckets(View):
    """``tensors`` and ``bytes``: how many all layouts hold."""

    tensors: int
    bytes: int
    layouts: list[BucketLayout]


def make_layouts(layouts: Layouts, configurations: dict[Role, Configuration]) -> JobBuckets:
    tensors = layouts.tensors
    return JobBuckets(
        tensors=len(tensors),
        bytes=sum(tensor.bytes for tensor in tensors),
        layouts=[
            BucketLayout(
                role=role, words=describe(configuration), buckets=buckets(layouts, configuration)
            )
            for role, configuration in configurations.items()
        ],
    )


def buckets(layouts: Layouts, configuration: Configuration) -> list[Bucket]:
    """Return the buckets in the order in which they can start."""
    names = [tensor.name for tensor in layouts.tensors]
    return [
        Bucket(
            bytes=cut.bytes,
            tensors=len(cut.positions),
            first=names[cut.positions[0]],
            last=names[cut.last],
        )
        for cut in layouts.buckets(configuration)
    ]


# A hundred kilobytes each, and only looked at one by one.
OVERVIEWS_KEPT = 32
# A list of jobs sums up for so long what changed; what is left is shown as it was, and comes first
# next time.
LIST_BUDGET_SECONDS = 0.1
MOST_JOBS_LISTED = 1000
NEWEST_EVENTS = 200


class JobList(Page):
    jobs: list[JobSummary]


class KnobInWords(View):
    """What people call a knob, and its values that have other words than their own."""

    name: str
    values: dict[str, str]


class JobOverview(View):
    """All that is shown of a job while it runs.

    ``best``: after each measured trial of the round; it rises where the best configuration turns
    out to be slower when it is measured again, and ends with the best's step time. ``ranks``:
    of more than 256 those that compute longest and shortest. ``why``: why this configuration.
    ``machine_change``: one sentence if the machine itself became slower or faster during the
    tuning, else empty. ``stock``: the best that PyTorch's own DistributedDataParallel can do, and
    ``stock_ddp`` the Python for it; empty where there is none. ``events``: the newest.
    ``lives``: those of its training, if it has several. ``knob_words``: of the job's knobs, and of
    those that the service knows.
    """

    job: JobSummary
    default_configuration: ConfigurationField
    ranks_per_node: tuple[int, ...]
    software: dict[str, str]
    fingerprint: str
    limits: Limits
    knobs: dict[str, Knob]
    trials: list[ShownTrial]
    steps: StepSeries
    switches: list[Switch]
    best: list[BestSoFar]
    ranks: list[RankTime]
    why: str
    machine_change: str
    stock: StockSetting
    stock_ddp: str
    events: list[Event]
    lives: Sequence[Life] = ()
    knob_words: Mapping[str, KnobInWords] = {}


class FittedCurve(NamedTuple):
    """``shown``: when the job was made, its round, whether its training ended; ``trials``: closed
    ones of that round, which is not the shown one if the training ended within it.
    """

    shown: tuple[float, int, bool]
    trials: int
    curve: Curve


class Overviews:
    """Methods of one job raise UnknownJob if there is no such job. Thread-safe.

    Args:
        store: is only read.
        searcher: the search method whose curves are shown, see bagua_autotune.search.
        knowledge: of the store's jobs, where others need it too.
        summaries: of the store's jobs, where others look at them too.
        is_deciding: whether this process decides what follows in a job.
        stopwatch: seconds, for the budget.
    """

    def __init__(
        self,
        store: Store,
        searcher: str = "bayesian",
        knowledge: Knowledge | None = None,
        summaries: Summaries | None = None,
        is_deciding: Callable[[str], bool] = lambda job_id: False,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._make_searcher = partial(make_searcher, searcher)
        self._knowledge = knowledge or Knowledge(store)
        self._summaries = summaries or Summaries(store)
        self._is_deciding = is_deciding
        self._stopwatch = stopwatch
        self._overviews: Cache[JobOverview] = Cache(OVERVIEWS_KEPT)
        self._curves: Cache[FittedCurve] = Cache(OVERVIEWS_KEPT)
        self._layouts: Cache[JobBuckets] = Cache(OVERVIEWS_KEPT)
        # Fits are bound by Python's lock: more at once only slow the requests down, and all that
        # wait would leave no thread to the ranks.
        self._one_fit = threading.Lock()

    def job_list(
        self,
        name: str | None = None,
        limit: int = 100,
        after: str | None = None,
        team: str | None = None,
    ) -> JobList:
        """Newest first, those behind the job ``after``; of all teams, or of one.

        A job that cannot be read is left out. Where many changed, some have the figures, and the
        ``revision``, of a while ago; never another state, and never an older last contact.
        """
        newest = self.store.jobs.contacts(name, limit + 1, after, team)
        following = newest[limit - 1].id if len(newest) > limit else None
        newest = newest[:limit]
        until = self._stopwatch() + LIST_BUDGET_SECONDS
        longest_ago = sorted(newest, key=self._known_at)
        each = read_each(longest_ago, lambda contact: self._listed(contact, until))
        found = {summary.id: summary for summary in each}
        jobs = [found[contact.id] for contact in newest if contact.id in found]
        return JobList(jobs=jobs, next=following)

    def _listed(self, contact: Contact, until: float) -> JobSummary:
        known = self._summaries.known(contact)
        # Its headline tells the state too, so that cannot be mended.
        is_alike = known and (known.summary.state, known.summary.ended_at) == (
            contact.phase,
            contact.ended_at,
        )
        if known is None or not is_alike or self._stopwatch() < until:
            known = self._summaries.of(contact)
        return _as_of_now(known.summary, contact, self._is_deciding(contact.id))

    def _known_at(self, contact: Contact) -> float:
        known = self._summaries.known(contact)
        return known.summary.last_contact_at if known else 0.0

    def overview(self, job_id: str) -> JobOverview:
        with self.store.database.reading():
            contact, deciding = self._look(job_id)
            # Not part of what is kept: they change with other jobs.
            lives = make_lives(self.store, self._summaries, job_id)
        found = self._overviews.get(job_id, contact.version, lambda: self._make(job_id))
        job = _as_of_now(found.job, contact, deciding)
        return found.model_copy(update={"job": job, "lives": lives})

    def detail(self, job_id: str) -> JobDetail:
        """All that is known of a job but its trials."""
        return job_detail(self.store, job_id, self._look(job_id)[1])

    def _look(self, job_id: str) -> tuple[Contact, bool]:
        """The job, and whether this process or another decides what follows in it."""
        is_deciding = self._is_deciding(job_id)
        contact, claimed_until = self.store.jobs.contact_and_claim(job_id)
        return contact, is_deciding or is_in_force(claimed_until or 0.0, time.time())

    def curve(self, job_id: str) -> Curve:
        """What the search believes; made anew once a trial was closed.

        While one is being made, nobody waits: who asks gets the latest one, or none. That it rests
        on fewer trials than were closed says that there is more to come.
        """
        with self.store.database.reading():
            job, stored = self.store.jobs.get(job_id), self.store.trials.of(job_id)
        trials = closed(Round.of(job, stored).trials)
        shown = job.created_at, job.round, job.phase in CUT_SHORT
        known = self._curves.known(job_id)
        if known and (known.shown, known.trials) == (shown, trials):
            return known.curve
        if not self._one_fit.acquire(blocking=False):
            return known.curve if known and known.shown == shown else Curve(trials=0)
        try:
            made = self._curves.get(
                job_id, (shown, trials), lambda: FittedCurve(shown, trials, self._fit(job, stored))
            )
        finally:
            self._one_fit.release()
        return made.curve

    def _fit(self, job: Job, trials: Sequence[Trial]) -> Curve:
        return make_curve(job, trials, self._knowledge, self._make_searcher)

    def buckets(self, job_id: str) -> JobBuckets:
        """How the tensors are cut by default, and by the best configuration so far."""
        job = self.store.jobs.get(job_id)
        if job.protocol in RUNS:
            return JobBuckets(tensors=0, bytes=0, layouts=[])
        if BUCKET_KNOB not in job.space:
            return make_layouts(self._knowledge.layouts(job), {})
        best = best_trial(Round.shown(job, self.store.trials.of(job_id)))
        configurations: dict[Role, Configuration] = {"default": job.baseline}
        if best is not None:
            configurations["incumbent"] = best.configuration
        version = job.created_at, *configurations.values()
        return self._layouts.get(
            job_id, version, lambda: make_layouts(self._knowledge.layouts(job), configurations)
        )

    def _make(self, job_id: str) -> JobOverview:
        with self.store.database.reading():
            return self._put_together(read(self.store, job_id))

    def _put_together(self, reading: Reading) -> JobOverview:
        summary = make_summary(self.store, reading)
        job, job_id = reading.job, reading.job.id
        stock = stock_setting(reading)
        has_seconds = reading.objective.seconds(0.0) is not None
        times = self.store.observations.step_times(job_id) if has_seconds else []
        return JobOverview(
            job=summary,
            default_configuration=job.baseline,
            ranks_per_node=job.ranks_per_node,
            software=job.software,
            fingerprint=job.fingerprint,
            limits=job.limits,
            knobs=dict(job.space),
            trials=shown_trials(reading),
            steps=thin_out(times),
            switches=switches(reading),
            best=best_so_far(reading, summary.figures.incumbent_seconds),
            # One process times a whole run; and one that trains alone is compared with none.
            ranks=rank_times(reading.latest) if job.protocol == "v2" and job.world_size > 1 else [],
            why=explain(reading, summary.figures, self._exposed(reading)),
            machine_change=machine_change(reading),
            stock=stock,
            stock_ddp=stock_ddp_snippet(stock) if has_stock_line(job) else "",
            events=self.store.events.of(job_id, NEWEST_EVENTS),
            knob_words=_knob_words(job.space),
        )

    def _exposed(self, reading: Reading) -> Mapping[int, float]:
        """Return the communication that computing does not hide, of the best trial and the
        default's.
        """
        job, shown = reading.job, reading.shown
        # A single rank communicates nothing.
        wanted = [best_trial(shown), shown.defaults.trial] if job.world_size > 1 else []
        found: dict[int, float] = {}
        for trial in filter(None, wanted):
            steps = self.store.observations.latest(job.id, trial.index, LATEST_STEPS)
            profiles = self.store.profiles.latest(job.id, LATEST_PROFILES, trial.index)
            exposed = exposed_seconds(steps, profiles)
            if exposed is not None:
                found[trial.index] = exposed
        return found


def _knob_words(space: Space) -> dict[str, KnobInWords]:
    known = {knob: words_of(knob) for knob in (*KNOB_WORDS, *space)}
    return {k: KnobInWords(name=w.name, values=dict(w.values)) for k, w in known.items()}


def _as_of_now(summary: JobSummary, contact: Contact, deciding: bool) -> JobSummary:
    last = contact.last_contact_at
    return summary.model_copy(update={"deciding": deciding, "last_contact_at": last})
