"""Whether something is wrong with the job: silence, failures, drift, alerts."""

from __future__ import annotations

from typing import Any

from dashboards.grafana.panels import (
    BAD,
    BEST,
    NOW,
    WARNING,
    fixed,
    lanes,
    limits,
    lines,
    mapping,
    properties,
    sized,
    value,
)
from dashboards.grafana.queries import JOB, of_job, or_none, over_time

ALERTS = (
    "BaguaAutotuneDown",
    "BaguaAutotuneGone",
    "BaguaAutotuneJobSilent",
    "BaguaAutotuneNotConverging",
    "BaguaAutotuneSpeedupLost",
    "BaguaAutotuneSlowRank",
    "BaguaAutotuneStoreErrors",
)


def panels() -> list[Any]:
    return [
        sized(_silence(), 6, 4),
        sized(_failures(), 6, 4),
        sized(_drifts(), 6, 4),
        sized(_rounds(), 6, 4),
        sized(_alerts(), 12, 8),
        sized(_trials_by_state(), 12, 8),
    ]


def _silence() -> Any:
    panel = value(
        "Heard of last",
        "Time since the job last reported. While it is tuned it reports every few seconds; "
        "a finished one only speaks up when its step time drifts.",
        "s",
        over_time(f"time() - {of_job('job_last_contact_timestamp_seconds')}"),
    ).decimals(0)
    return panel


def _failures() -> Any:
    failures = f"sum by (job_name) ({of_job('trial_failures_total', 'reason')})"
    panel = value(
        "Failed trials",
        "Trials that ended without a usable measurement, over all rounds. The search goes on "
        "without them.",
        "none",
        over_time(failures, "failed"),
    )
    limits(panel, {1: WARNING}, first=BEST)
    return panel


def _drifts() -> Any:
    return value(
        "Drifts",
        "Lasting changes of the step time that the job noticed after its tuning.",
        "none",
        over_time(of_job("drifts_total"), "drifts"),
    )


def _rounds() -> Any:
    return value(
        "Rounds of tuning",
        "1 for the first tuning, and 1 for each after a lasting drift.",
        "none",
        over_time(of_job("rounds_total"), "rounds"),
    )


def _alerts() -> Any:
    return lanes(
        "Alerts",
        "Of this job and of the service, as the rules in dashboards/prometheus say. Needs these "
        "rules to be loaded in Prometheus.",
        "none",
        *(over_time(firing(name), name) for name in ALERTS),
    ).mappings([mapping({"0": ("quiet", "rgba(115, 191, 105, 0.35)"), "1": ("firing", BAD)})])


def firing(name: str) -> str:
    """1 while the alert fires for the job, or for the service (which has no ``job_name``)."""
    found = f'ALERTS{{alertname="{name}",alertstate="firing"'
    return or_none(f'max({found},{JOB}}} or {found},job_name=""}})')


def _trials_by_state() -> Any:
    panel = lines(
        "Trials so far",
        "Measured ones tell the search something; failed ones do not. Over all rounds.",
        "none",
        over_time(of_job("trials", "state", where='state=~"measured|failed"'), "{{state}}"),
    )
    panel.min(0).decimals(0)
    panel.override_by_name("measured", properties(color=fixed(NOW)))
    panel.override_by_name("failed", properties(color=fixed(BAD)))
    return panel
