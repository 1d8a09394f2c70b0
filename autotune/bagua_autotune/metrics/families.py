"""What the metrics tell of one job. A value that is not known has no sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bagua_autotune.metrics.reasons import FAILURES
from bagua_autotune.model.job import JobPhase, TrialState
from bagua_autotune.model.knobs import Value
from bagua_autotune.model.text import describe_bytes
from bagua_autotune.store import Contact
from bagua_autotune.views import JobSum

PHASES: tuple[str, ...] = get_args(JobPhase)
JOB = "job_name"  # "job" is what Prometheus calls the scraped target


def state_families(name: str | None) -> list[Metric]:
    """Always the same ones in the same order, in need of values; of no job no samples."""
    states = GaugeMetricFamily(
        "bagua_autotune_job_state", "1 for the state that the job is in.", labels=[JOB, "state"]
    )
    last = GaugeMetricFamily(
        "bagua_autotune_job_last_contact_timestamp_seconds",
        "When the job was last heard of, in seconds since the epoch.",
        labels=[JOB],
    )
    started = GaugeMetricFamily(
        "bagua_autotune_job_started_timestamp_seconds",
        "When the job was registered, in seconds since the epoch.",
        labels=[JOB],
    )
    if name is not None:
        for phase in PHASES:
            states.add_metric([name, phase], 0)
        last.add_metric([name], 0)
        started.add_metric([name], 0)
    return [states, last, started]


def state_values(contact: Contact) -> list[float]:
    """Of all samples of the job, in their order."""
    states = [float(contact.phase == phase) for phase in PHASES]
    return [*states, contact.last_contact_at, contact.created_at]


def _words(knob: str, value: Value) -> str:
    """A value alone, since its knob is a label of its own: ``4 MiB``, ``leaders``."""
    if isinstance(value, tuple):
        return f"{len(value)} buckets" if value else "by size"
    if isinstance(value, int) and knob.endswith("_bytes"):
        return describe_bytes(value)
    return str(value)


def _numbers(configuration: Mapping[str, Value] | None) -> dict[tuple[str, ...], float | None]:
    """The values that are numbers, by knob."""
    values = (configuration or {}).items()
    return {(knob,): float(value) for knob, value in values if isinstance(value, int)}


# By the values of the labels that a family has besides the job's name.
Samples = Mapping[tuple[str, ...], float | None]


@dataclass(frozen=True)
class Family:
    """A family and how a job's samples of it are found; a name on ``_total`` makes a counter."""

    name: str
    documentation: str
    labels: tuple[str, ...]
    samples: Callable[[JobSum], Samples]

    def of(self, job: JobSum | None) -> Metric:
        """The job's samples; of no job none."""
        kind = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        family = kind(self.name, self.documentation, labels=[JOB, *self.labels])
        for labels, value in (self.samples(job) if job else {}).items():
            if value is not None:
                family.add_metric([job.summary.name, *labels] if job else [], float(value))
        return family


def job_families(job: JobSum | None) -> list[Metric]:
    """Always the same ones in the same order."""
    return [family.of(job) for family in FAMILIES]


def _value(name: str, documentation: str, value: Callable[[JobSum], float | None]) -> Family:
    """A family without further labels."""
    return Family(name, documentation, (), lambda job: {(): value(job)})


def _trials(job: JobSum) -> Samples:
    return {(state,): job.totals.trials.get(state, 0) for state in get_args(TrialState)}


def _failures(job: JobSum) -> Samples:
    return {(reason,): job.totals.failures.get(reason, 0) for reason in FAILURES}


def _current_trial(job: JobSum) -> float | None:
    return job.summary.trial.index if job.summary.trial else None


def _configuration(job: JobSum) -> Samples:
    return {(knob, _words(knob, value)): 1 for knob, value in job.summary.configuration.items()}


def _result(job: JobSum) -> Samples:
    return {(job.summary.reason,): 1} if job.summary.reason else {}


FAMILIES = (
    _value(
        "bagua_autotune_trials_limit",
        "Most trials of a search, as it was set (BAGUA_AUTOTUNE_MAX_SAMPLES).",
        lambda job: job.summary.progress.max_trials,
    ),
    _value(
        "bagua_autotune_search_cost_steps",
        "Time that the latest round has lost against the default, in the default's steps.",
        lambda job: job.summary.figures.cost_steps,
    ),
    _value("bagua_autotune_job_ranks", "Ranks of the job.", lambda job: job.summary.world_size),
    _value(
        "bagua_autotune_baseline_step_seconds",
        "Step time under the job's own default configuration.",
        lambda job: job.summary.figures.baseline_seconds,
    ),
    _value(
        "bagua_autotune_incumbent_step_seconds",
        "Step time under the best configuration so far, or the one that was kept.",
        lambda job: job.summary.figures.incumbent_seconds,
    ),
    _value(
        "bagua_autotune_current_step_seconds",
        "Median of the latest steps reported, at most 20: of the trial that runs, which is told "
        "from its first steps on; once tuned, of what was kept.",
        # Who reads metrics pairs them with the number of the trial that runs.
        lambda job: job.summary.figures.current_seconds if job.totals.is_current else None,
    ),
    _value(
        "bagua_autotune_speedup_ratio",
        "Step time of the baseline over that of the final choice, or else the best so far.",
        lambda job: job.summary.figures.speedup,
    ),
    _value(
        "bagua_autotune_speedup_lower_ratio",
        "Lower end of the speed-up's 95 % interval; not confirmed while the job is tuned.",
        lambda job: job.summary.figures.speedup_low,
    ),
    _value(
        "bagua_autotune_speedup_upper_ratio",
        "Upper end of the speed-up's 95 % interval; not confirmed while the job is tuned.",
        lambda job: job.summary.figures.speedup_high,
    ),
    Family("bagua_autotune_trials", "Trials by state, of all rounds.", ("state",), _trials),
    Family(
        "bagua_autotune_trial_failures_total",
        "Trials that failed: the ranks disagreed, or the training suffered (diverged).",
        ("reason",),
        _failures,
    ),
    _value(
        "bagua_autotune_current_trial",
        "Number of the trial that runs; absent when none does.",
        _current_trial,
    ),
    Family(
        "bagua_autotune_configuration_info",
        "What the job runs now: 1 for each knob and its value in words.",
        ("knob", "state"),
        _configuration,
    ),
    Family(
        "bagua_autotune_knob_value",
        "What the job runs now, of the knobs that are numbers.",
        ("knob",),
        lambda job: _numbers(job.summary.configuration),
    ),
    Family(
        "bagua_autotune_incumbent_knob_value",
        "What the best trial of the latest round ran, of the knobs that are numbers.",
        ("knob",),
        lambda job: _numbers(job.summary.progress.incumbent),
    ),
    _value(
        "bagua_autotune_search_steps_total",
        "Steps from the first trial of a round to the end of its last, of all rounds.",
        lambda job: job.totals.search_steps,
    ),
    _value(
        "bagua_autotune_search_seconds_total",
        "Wall time from the first trial of a round to the end of its last, of all rounds.",
        lambda job: job.totals.search_seconds,
    ),
    _value(
        "bagua_autotune_search_cost_seconds",
        "Time that the latest round has lost against the baseline.",
        lambda job: job.summary.figures.cost_seconds,
    ),
    _value(
        "bagua_autotune_payback_steps",
        "After how many steps at the final choice the latest round's cost is earned.",
        lambda job: job.summary.figures.payback_steps,
    ),
    _value(
        "bagua_autotune_exposed_communication_seconds",
        "Communication per step that computing does not hide, median of the latest steps.",
        lambda job: job.summary.figures.exposed_seconds,
    ),
    _value(
        "bagua_autotune_rank_spread_ratio",
        "By what part of a step the slowest rank computes longer than the middle one.",
        lambda job: job.summary.figures.rank_spread_ratio,
    ),
    _value(
        "bagua_autotune_slowest_rank",
        "The rank that was slowest in most of the latest steps.",
        lambda job: job.summary.figures.slowest_rank,
    ),
    _value(
        "bagua_autotune_slowest_rank_share_ratio",
        "In which part of the latest steps that rank was the slowest.",
        lambda job: job.summary.figures.slowest_share,
    ),
    _value(
        "bagua_autotune_drifts_total",
        "Lasting changes of the step times that the ranks told of.",
        lambda job: job.totals.drifts,
    ),
    _value(
        "bagua_autotune_rounds_total",
        "Tunings that were begun, the first one included.",
        lambda job: job.summary.round + 1,
    ),
    Family(
        "bagua_autotune_job_result",
        "1 for why a tuned job was left with what it has, until it is tuned again.",
        ("reason",),
        _result,
    ),
)
