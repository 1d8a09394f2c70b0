"""The dashboard "Fleet": all jobs, and the service that tunes them."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.grafana import layout
from dashboards.grafana.fleet import jobs, service
from dashboards.grafana.layout import Section

UID = "bagua-autotune-fleet"


def dashboard() -> Dashboard:
    board = layout.dashboard(
        UID,
        "Fleet",
        "All jobs: which are being tuned, what they gained, and how the service is doing.",
        shown="now-6h",
    )
    return layout.add(
        board,
        [
            Section("How are the jobs?", jobs.overview()),
            Section("Which gained, and which did not?", jobs.gains()),
            Section("Is anything wrong?", jobs.trouble()),
            Section("How is the service doing?", service.panels()),
        ],
    )
