"""Marks on all panels of one job: each change of its configuration, and each end of tuning.

Grafana asks for marks at about a hundred points of the time shown, however long that is, at
multiples of their distance, and draws one mark for neighbouring points of a series. So a point
tells of all that began since the one before, a series is of one trial, and the value says when
that was.
"""

from __future__ import annotations

from collections.abc import Callable

from grafana_foundation_sdk.builders.dashboard import AnnotationQuery
from grafana_foundation_sdk.models import dashboard as models

from dashboards.grafana.queries import JOB, SOURCE

# No shorter than the interval of scraping; Grafana's own default is a minute.
STEP = "5s"
# How long ago the service may have been heard of last: between two trials none runs, and a
# service that was restarted tells of what there was before.
LOOKBACK = "1h"


class _PrometheusAnnotation(models.AnnotationQuery):
    """With what Grafana's Prometheus plug-in knows, and the SDK does not.

    ``titleFormat`` is the text of a mark, ``step`` the shortest distance of two points, and
    ``useValueForTime`` makes a value the time of its mark, in milliseconds.
    """

    title = ""

    def to_json(self) -> dict[str, object]:
        more = {"titleFormat": self.title, "step": STEP, "useValueForTime": True}
        return {**super().to_json(), **more}


class _Mark(AnnotationQuery):
    def __init__(self, name: str, title: str, colour: str, expression: str) -> None:
        annotation = _PrometheusAnnotation(
            name=name, datasource=SOURCE, icon_color=colour, expr=expression
        )
        annotation.title = title
        self._internal = annotation


def configuration_changes() -> AnnotationQuery:
    def trials(number: str) -> str:
        return f'count_values by (job_name) ("trial", max by (job_name) ({number}))'

    beginnings = _beginnings(f"bagua_autotune_current_trial{{{JOB}}}", trials)
    return _Mark("New configuration", "Trial {{trial}}", "rgba(115, 150, 220, 0.7)", beginnings)


def ends_of_tuning() -> AnnotationQuery:
    def tuned(states: str) -> str:
        return f"max by (job_name) ({states}) == 1"

    states = f'bagua_autotune_job_state{{{JOB},state=~"finished|ended|lost"}}'
    return _Mark("Tuning ended", "Tuning ended", "green", _beginnings(states, tuned))


def _beginnings(metric: str, series: Callable[[str], str]) -> str:
    """When, in milliseconds, each of the series began that was not there at the point before."""
    before = series(f"last_over_time({metric}[{LOOKBACK}] offset $__interval)")
    times = f"(({series(metric)}) * 0 + time())[$__interval:{STEP}]"
    return f"1000 * min_over_time({times}) unless ({before})"
