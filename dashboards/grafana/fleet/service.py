"""The service itself: is it up, how fast does it answer, does its store work."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models.common import BigValueGraphMode, BigValueTextMode

from dashboards.grafana.panels import (
    BAD,
    BEST,
    NOW,
    fixed,
    limits,
    lines,
    mapping,
    properties,
    sized,
    value,
)
from dashboards.grafana.queries import SERVICE, or_none, over_time


def panels() -> list[Any]:
    return [
        sized(_up(), 4, 4),
        sized(_version(), 4, 4),
        sized(_store_errors(), 4, 4),
        sized(_memory(), 6, 4),
        sized(_processor(), 6, 4),
        sized(_requests(), 12, 9),
        sized(_latency(), 12, 9),
        sized(_proposals(), 12, 9),
        sized(_errors(), 12, 9),
        *(sized(panel, 6, 8) for panel in (_database(), _disk(), _connections(), _teams())),
    ]


def _up() -> Any:
    panel = value(
        "Service",
        "Whether Prometheus reaches it. Training goes on without it.",
        "none",
        over_time(f"min(up{SERVICE})", "up"),
    ).mappings([mapping({"1": ("up", BEST), "0": ("down", BAD)})])
    return panel


def _version() -> Any:
    panel = value(
        "Version",
        "Version of the service. All replicas should run the same one.",
        "none",
        over_time("max by (version) (bagua_autotune_build_info)", "{{version}}"),
    )
    return panel.text_mode(BigValueTextMode.NAME)


def _store_errors() -> Any:
    panel = value(
        "Store errors",
        "Requests in the time shown that failed because the database did. Clients send them again.",
        "none",
        over_time("sum(increase(bagua_autotune_store_errors_total[$__range]))", "errors"),
    ).decimals(0)
    limits(panel, {1: BAD}, first=BEST)
    return panel


def _memory() -> Any:
    panel = value(
        "Memory",
        "Resident memory of the service.",
        "bytes",
        over_time(f"sum(process_resident_memory_bytes{SERVICE})", "memory"),
    )
    return panel.graph_mode(BigValueGraphMode.AREA)


def _processor() -> Any:
    panel = value(
        "Processor",
        "Share of one core. Proposals are computed in a separate process, which is not counted "
        "here.",
        "percentunit",
        over_time(f"sum(rate(process_cpu_seconds_total{SERVICE}[$__rate_interval]))", "processor"),
    )
    return panel.decimals(1).graph_mode(BigValueGraphMode.AREA)


def _requests() -> Any:
    rate = "rate(bagua_autotune_requests_total[$__rate_interval])"
    return lines(
        "Requests",
        "By route and status code. 4xx is a client's mistake, 5xx the service's.",
        "reqps",
        over_time(f"sum by (route, code) ({rate})", "{{route}} {{code}}"),
    ).min(0)


def _latency() -> Any:
    return lines(
        "Time to answer",
        "The 99th percentile by route. Training never waits for an answer.",
        "s",
        over_time(_quantile(0.99, "request_seconds", "route"), "{{route}}"),
    ).min(0)


def _proposals() -> Any:
    total = "bagua_autotune_proposal_seconds"
    panel = lines(
        "Time to propose a trial",
        "Median and 95th percentile of the last five minutes, if anything was proposed in them, "
        "and the mean since the start. The ranks train on meanwhile.",
        "s",
        over_time(_quantile(0.5, "proposal_seconds", window="5m"), "median"),
        over_time(_quantile(0.95, "proposal_seconds", window="5m"), "95th percentile"),
        over_time(f"sum({total}_sum) / sum({total}_count)", "mean"),
    ).min(0)
    panel.override_by_name("median", properties(color=fixed(NOW)))
    return panel


def _errors() -> Any:
    found = 'rate(bagua_autotune_requests_total{code=~"4..|5.."}[$__rate_interval])'
    store = "rate(bagua_autotune_store_errors_total[$__rate_interval])"
    return (
        lines(
            "Errors",
            "Requests that were refused or failed, and failures of the database.",
            "reqps",
            over_time(or_none(f"sum by (code) ({found})", "code"), "{{code}}"),
            over_time(f"sum by (reason) ({store})", "store: {{reason}}"),
        )
        .min(0)
        .axis_soft_max(1)
    )


def _database() -> Any:
    return lines(
        "Database",
        "What it takes on its disk. Old jobs are deleted by the service itself.",
        "bytes",
        over_time("max(bagua_autotune_database_bytes)", "size"),
    ).min(0)


def _disk() -> Any:
    panel = lines(
        "Free disk",
        "Room on the disk of the SQLite file. Of PostgreSQL it is not known here. On a full disk "
        "nothing is stored, but jobs can be deleted.",
        "bytes",
        over_time("min(bagua_autotune_database_free_bytes)", "free"),
    ).min(0)
    panel.override_by_name("free", properties(color=fixed(NOW)))
    return panel


def _connections() -> Any:
    panel = lines(
        "Connections",
        "Open, and how many may be. Where all are taken, those that were idle longest make room.",
        "none",
        over_time("sum(bagua_autotune_connections)", "open"),
        over_time("sum(bagua_autotune_connections_limit)", "limit"),
    ).min(0)
    panel.override_by_name("limit", properties(color=fixed(BAD)))
    return panel


def _teams() -> Any:
    return (
        lines(
            "Jobs by team",
            "Jobs that have not ended, by the team whose token they came with; none: with the "
            "service's own.",
            "none",
            over_time("max by (team) (bagua_autotune_team_running)", "{{team}}"),
        )
        .min(0)
        .decimals(0)
    )


def _quantile(quantile: float, name: str, *labels: str, window: str = "$__rate_interval") -> str:
    by = ", ".join(("le", *labels))
    counts = f"sum by ({by}) (rate(bagua_autotune_{name}_bucket[{window}]))"
    return f"histogram_quantile({quantile}, {counts})"
