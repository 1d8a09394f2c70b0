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
    "BaguaAutotuneRefusedTokens",
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
        "Last report",
        "Time since the job last reported. It reports every few seconds while it is being tuned, "
        "and every 45 seconds afterwards.",
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
        "How often the step time changed for good after a tuning.",
        "none",
        over_time(of_job("drifts_total"), "drifts"),
    )


def _rounds() -> Any:
    return value(
        "Rounds of tuning",
        "1 for the first tuning, and 1 more each time the job was tuned again.",
        "none",
        over_time(of_job("rounds_total"), "rounds"),
    )


def _alerts() -> Any:
    return lanes(
        "Alerts",
        "Alerts of this job and of the service. Prometheus must have loaded the rules of "
        "dashboards/prometheus.",
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
        "Trials of all rounds, by state. Infeasible: there is not enough memory on some rank.",
        "none",
        over_time(
            of_job("trials", "state", where='state=~"measured|failed|infeasible"'), "{{state}}"
        ),
    )
    panel.min(0).decimals(0)
    panel.override_by_name("measured", properties(color=fixed(NOW)))
    panel.override_by_name("failed", properties(color=fixed(BAD)))
    panel.override_by_name("infeasible", properties(color=fixed(WARNING)))
    return panel
