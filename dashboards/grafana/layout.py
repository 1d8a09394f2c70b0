"""A dashboard of sections: places, ids, data source, links and the choice of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    Row,
    TimePicker,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DashboardLinkType

TAG = "bagua-autotune"


class Section(NamedTuple):
    """Panels under a heading that says what a reader wants to know."""

    question: str
    panels: Sequence[Any]


def dashboard(uid: str, title: str, description: str, shown: str) -> Dashboard:
    """Without panels.

    Args:
        shown: the time shown at first, as ``now-1h``.
    """
    others = (
        DashboardLink("Bagua Autotune")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .include_vars(False)
        .keep_time(True)
        .as_dropdown(False)
        .icon("external link")
        .target_blank(False)
        .tooltip("")
        .url("")
    )
    return (
        Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .timezone("browser")
        .time(shown, "now")
        .refresh("10s")
        .timepicker(TimePicker().refresh_intervals(["5s", "10s", "30s", "1m", "5m"]))
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(others)
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )


def add(board: Dashboard, sections: Sequence[Section]) -> Dashboard:
    """Each section's panels beside each other, as far as they fit, under its heading."""
    number = 0
    for section in sections:
        number += 1
        board.with_row(Row(section.question).id(number))
        for panel in section.panels:
            number += 1
            board.with_panel(panel.id(number))
    return board
