"""The metrics of one job. A value that is not known has no sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from bagua_autotune.model import reasons
from bagua_autotune.model.job import TrialState
from bagua_autotune.store.jobs import Contact
from bagua_autotune.views.summary import JobSum
from bagua_wire.configuration import Value
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.messages import JobPhase

PHASES: tuple[str, ...] = get_args(JobPhase)
# All that a trial fails for: the ranks could not, or would not, run it together; or it harmed them;
# or it was a whole run, which failed. A label must not grow with what clients say.
FAILURES = (reasons.DISAGREEMENT_CODE, reasons.DIVERGED_CODE, reasons.RUN_FAILED_CODE)
JOB = "job_name"  # "job" is what Prometheus calls the scraped target


def state_families(name: str | None) -> list[Metric]:
    """Always the same ones in the same order, in need of values; of no job no samples."""
    states = GaugeMetricFamily(
        "bagua_autotune_job_state", "1 for the state that the job is in.", labels=[JOB, "state"]
    )
    last = GaugeMetricFamily(
        "bagua_autotune_job_last_contact_timestamp_seconds",
        "When the job last reported, in seconds since the epoch.",
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
    """The states of all samples of the job, in their order."""
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
    return job.totals.running.index if job.totals.running else None


def _running(job: JobSum) -> Mapping[str, Value]:
    """The configuration that the ranks run."""
    trial = job.totals.running
    return trial.configuration if trial else job.summary.configuration


def _configuration(job: JobSum) -> Samples:
    return {(knob, _words(knob, value)): 1 for knob, value in _running(job).items()}


def _result(job: JobSum) -> Samples:
    return {(job.summary.reason,): 1} if job.summary.reason else {}


FAMILIES = (
    _value(
        "bagua_autotune_job_ranks",
        "Number of ranks of the job.",
        lambda job: job.summary.world_size,
    ),
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
        "Median step time of the latest reported steps, at most 20: of the running trial, from its "
        "first steps on; once the job is tuned, of the configuration that was kept.",
        # Who reads metrics pairs them with the number of the trial that runs.
        lambda job: job.summary.figures.current_seconds if job.totals.is_current else None,
    ),
    _value(
        "bagua_autotune_speedup_ratio",
        "Step time under the default divided by that of the final choice, or of the best so far.",
        lambda job: job.summary.figures.speedup,
    ),
    _value(
        "bagua_autotune_speedup_lower_ratio",
        "Lower end of the speed-up's 95 % interval; not confirmed while the job is being tuned.",
        lambda job: job.summary.figures.speedup_low,
    ),
    _value(
        "bagua_autotune_speedup_upper_ratio",
        "Upper end of the speed-up's 95 % interval; not confirmed while the job is being tuned.",
        lambda job: job.summary.figures.speedup_high,
    ),
    _value(
        "bagua_autotune_baseline_peak_memory_bytes",
        "Memory that the job's default configuration takes at its peak on the fullest rank.",
        lambda job: job.summary.figures.default_peak_bytes,
    ),
    _value(
        "bagua_autotune_incumbent_peak_memory_bytes",
        "The same of the best configuration so far, or of the one that was kept.",
        lambda job: job.summary.figures.peak_bytes,
    ),
    _value(
        "bagua_autotune_device_memory_bytes",
        "Memory that there is for the fullest rank.",
        lambda job: job.summary.figures.device_bytes,
    ),
    Family("bagua_autotune_trials", "Trials by state, in all rounds.", ("state",), _trials),
    _value(
        "bagua_autotune_trials_limit",
        "Most trials of a search, as it was set (BAGUA_AUTOTUNE_MAX_SAMPLES).",
        lambda job: job.summary.progress.max_trials,
    ),
    Family(
        "bagua_autotune_trial_failures_total",
        "Failed trials, by reason: the ranks disagreed, the loss rose (diverged), or a run of "
        "`system` failed (run_failed).",
        ("reason",),
        _failures,
    ),
    _value(
        "bagua_autotune_current_trial",
        "Index of the running trial; no sample if none runs.",
        _current_trial,
    ),
    Family(
        "bagua_autotune_configuration_info",
        "The running configuration: 1 for each knob and its value in words.",
        ("knob", "state"),
        _configuration,
    ),
    Family(
        "bagua_autotune_knob_value",
        "The running configuration: the value of each knob that is a number.",
        ("knob",),
        lambda job: _numbers(_running(job)),
    ),
    Family(
        "bagua_autotune_incumbent_knob_value",
        "The latest round's best trial: the value of each knob that is a number.",
        ("knob",),
        lambda job: _numbers(job.summary.progress.incumbent),
    ),
    _value(
        "bagua_autotune_search_steps_total",
        "Steps from the first to the end of the last trial of a round, summed over all rounds.",
        lambda job: job.totals.search_steps,
    ),
    _value(
        "bagua_autotune_search_seconds_total",
        "Wall time from the first to the end of the last trial of a round, summed over all rounds.",
        lambda job: job.totals.search_seconds,
    ),
    _value(
        "bagua_autotune_search_cost_seconds",
        "Time that the latest round has lost compared with the default.",
        lambda job: job.summary.figures.cost_seconds,
    ),
    _value(
        "bagua_autotune_search_cost_steps",
        "Time that the latest round has lost compared with the default, in the default's steps.",
        lambda job: job.summary.figures.cost_steps,
    ),
    _value(
        "bagua_autotune_payback_steps",
        "Steps with the final choice after which the latest round's cost is paid back.",
        lambda job: job.summary.figures.payback_steps,
    ),
    _value(
        "bagua_autotune_job_saved_rank_seconds",
        "Time of the job's ranks that tuning has saved, less what the searches cost.",
        lambda job: job.summary.saved_rank_seconds,
    ),
    _value(
        "bagua_autotune_exposed_communication_seconds",
        "Communication per step that computing does not hide, median of the latest steps.",
        lambda job: job.summary.figures.exposed_seconds,
    ),
    _value(
        "bagua_autotune_rank_spread_ratio",
        "How much longer the slowest rank computes than the median rank, as a part of a step.",
        lambda job: job.summary.figures.rank_spread_ratio,
    ),
    _value(
        "bagua_autotune_slow_rank",
        "The rank that computes so much longer than the others, and so often, that this is not "
        "chance; absent without one.",
        lambda job: job.summary.figures.slow_rank,
    ),
    _value(
        "bagua_autotune_slowest_rank",
        "The rank that was slowest in most of the latest steps.",
        lambda job: job.summary.figures.slowest_rank,
    ),
    _value(
        "bagua_autotune_slowest_rank_share_ratio",
        "Share of the latest steps in which that rank was the slowest.",
        lambda job: job.summary.figures.slowest_share,
    ),
    _value(
        "bagua_autotune_drifts_total",
        "Lasting changes of the step time that the ranks reported.",
        lambda job: job.totals.drifts,
    ),
    _value(
        "bagua_autotune_rounds_total",
        "Rounds of tuning begun, including the first.",
        lambda job: job.summary.round + 1,
    ),
    Family(
        "bagua_autotune_job_result",
        "1 for the reason of the tuned job's final choice; no sample while it is being tuned.",
        ("reason",),
        _result,
    ),
)
