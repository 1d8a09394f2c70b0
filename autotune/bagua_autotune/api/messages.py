"""What ``/api/v2`` answers, made from records; what it takes in is in reports."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

from bagua_autotune.api.reports import TrialProfile
from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.job import (
    EventKind,
    JobPhase,
    Limits,
    Protocol,
    Purpose,
    TrialState,
)
from bagua_autotune.model.knobs import Knob, Value

MOST_JOBS_LISTED = 1000


class _Output(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class OpenTrial(_Output):
    index: int
    purpose: Purpose
    state: TrialState
    configuration: dict[str, Value]


class Progress(_Output):
    """``incumbent``: the best configuration so far, from all its trials of the round; ``speedup``:
    of it over the default."""

    trials_measured: int
    max_trials: int
    elapsed_seconds: float
    seconds_left: float | None
    speedup: float | None
    incumbent: dict[str, Value] | None


class Result(_Output):
    """Speed-ups are over the baseline; ``low`` and ``high`` bound the 95 % interval.

    ``cost_steps`` is what the search cost, in steps of the baseline's length; ``payback_steps``
    is after how many steps at this configuration it is earned, null where the baseline was kept.
    """

    configuration: dict[str, Value]
    kept: Literal["winner", "baseline"]
    speedup: float
    low: float
    high: float
    trials: int
    steps: int
    seconds: float
    summary: str
    cost_steps: float
    cost_seconds: float
    payback_steps: int | None


class JobState(_Output):
    """What all ranks shall run now, and how far tuning is.

    ``deciding``: the open trial is measured and the next is being chosen; ask again shortly.
    ``round`` counts the tunings: 0 is the first, another one follows each lasting change.
    """

    id: str
    name: str
    state: JobPhase
    round: int
    deciding: bool
    trial: OpenTrial | None
    configuration: dict[str, Value]
    progress: Progress
    result: Result | None


class JobDetail(JobState):
    """All that is known of a job but its trials.

    ``is_lost``: its ranks did not say that it ended; nothing is heard of them any more.
    """

    world_size: int
    ranks_per_node: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    knobs: dict[str, Knob]
    default_configuration: dict[str, Value]
    fingerprint: str
    limits: Limits
    software: dict[str, str]
    protocol: Protocol
    created_at: datetime
    last_contact_at: datetime
    ended_at: datetime | None
    is_lost: bool


class Figures(_Output):
    """Null where not (yet) known; ``seconds`` are per step, of the slowest rank.

    All are of one round: the result's own, or the latest while the job is being tuned. Default and
    best configuration count with all their trials of it. ``speedup`` is over the baseline: of the
    result once there is one, with its 95 % interval; before, of the best configuration so far,
    which is not confirmed, with the widest interval that its own and the default's allow (null
    without a spread to take it from). ``search_steps``, ``search_seconds`` (from the round's first
    trial to the end of its last), ``cost_seconds`` (lost against the baseline) and
    ``payback_steps`` are of the search.

    The others are of the latest steps: communication that computing does not hide; what the slowest
    rank computes longer than the middle one, in parts of a step; the rank that is slowest most
    often, and in which share of the steps; ``slow_rank``, that rank if it deserves a warning (over
    10 % of a step, in at least half of them).
    """

    baseline_seconds: float | None
    incumbent_seconds: float | None
    current_seconds: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    search_steps: int
    search_seconds: float
    cost_seconds: float | None
    cost_steps: float | None
    payback_steps: int | None
    exposed_seconds: float | None
    rank_spread_ratio: float | None
    slowest_rank: int | None
    slowest_share: float | None
    slow_rank: int | None


class JobSummary(JobState):
    """A job as a list shows it.

    ``headline`` is one plain sentence; ``revision`` is raised by whatever is written of the job,
    and is that of the figures, which in a list may be of a while ago.
    """

    protocol: Protocol
    world_size: int
    created_at: datetime
    last_contact_at: datetime
    ended_at: datetime | None
    is_lost: bool
    revision: int
    headline: str
    figures: Figures


class _Page(_Output):
    """A part of a list; ``next``, given as ``after``, gets what follows. Null at the end."""

    next: str | None = None


class JobList(_Page):
    jobs: list[JobSummary]


class Trial(_Output):
    """``seconds`` per step with its 95 % interval; null where there is none (yet).

    ``speedup``: of this trial alone, over all trials of the default in its round.
    """

    index: int
    round: int
    purpose: Purpose
    state: TrialState
    configuration: dict[str, Value]
    steps: int
    outliers: int
    seconds: float | None
    low: float | None
    high: float | None
    speedup: float | None
    started_at: datetime | None
    ended_at: datetime | None
    failure: str | None


class ShownTrial(Trial):
    """``is_best``: the first trial of what was kept, or else of the best configuration so far.

    ``words``: its configuration.
    """

    words: str
    is_best: bool


class TrialList(_Page):
    trials: list[Trial]


class Observation(_Output):
    """``seconds`` by rank; null where a rank did not report, or did not tell what it computed."""

    trial: int
    step: int
    seconds: tuple[float | None, ...]
    compute_seconds: tuple[float | None, ...] | None


class ObservationList(_Page):
    observations: list[Observation]


class ProfileList(_Output):
    profiles: list[TrialProfile]


class Event(_Output):
    kind: EventKind
    trial: int | None
    step: int | None
    message: str
    seconds: float | None
    at: datetime


class EventList(_Page):
    events: list[Event]


class StepPoint(_Output):
    step: int
    trial: int
    seconds: float


class StepSeries(_Output):
    """A point is the median of ``stride`` steps of a trial, or of what is left of them."""

    stride: int
    points: list[StepPoint]


class Switch(_Output):
    """The first observed step of a trial; without a trial the last one of a tuning."""

    step: int
    trial: int | None
    words: str


class BestSoFar(_Output):
    """The step time of what was the best configuration after this trial, from all its trials."""

    trial: int
    seconds: float


class RankTime(_Output):
    """Medians over the latest steps."""

    rank: int
    seconds: float
    compute_seconds: float | None


class JobOverview(_Output):
    """All that is shown of a job while it runs.

    ``best``: after each measured trial of the round; it rises where the best configuration turns
    out to be slower when it is measured again. ``ranks``: of more than 256 those that compute
    longest and shortest. ``why``: why this configuration. ``stock_ddp``: Python for PyTorch's own
    DistributedDataParallel. ``events``: the newest.
    """

    job: JobSummary
    default_configuration: dict[str, Value]
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
    stock_ddp: str
    events: list[Event]


class CurvePoint(_Output):
    bucket_bytes: int
    seconds: float
    low: float
    high: float


class CurveLine(_Output):
    """``values``: of all knobs but the bucket size."""

    label: str
    values: dict[str, Value]
    points: list[CurvePoint]


class Curve(_Output):
    """What the search believes a step takes, with the 95 % band, after so many closed trials.

    Without ``curves`` where it has no opinion (yet). ``expected_gain``: by how much it expects the
    next trial to lower the best step time, as a share of it: 0.004 is 0.4 %. Null where it cannot
    tell (yet).
    """

    trials: int
    curves: list[CurveLine]
    expected_gain: float | None


class Bucket(_Output):
    """``first`` and ``last``: names of its tensors, in gradient-ready order."""

    bytes: int
    tensors: int
    first: str
    last: str


class BucketLayout(_Output):
    role: Literal["default", "incumbent"]
    words: str
    buckets: list[Bucket]


class JobBuckets(_Output):
    tensors: int
    bytes: int
    layouts: list[BucketLayout]


class Problem(_Output):
    """RFC 9457: ``detail`` is a sentence that says what is wrong."""

    type: str
    title: str
    status: int
    detail: str
