"""Marks on all panels of one job: each change of its configuration, and each end of tuning."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import AnnotationQuery

from dashboards.grafana.queries import JOB, SOURCE, of_job


def configuration_changes() -> AnnotationQuery:
    return _marks("New configuration", "rgba(115, 150, 220, 0.7)", _changed("current_trial", "!="))


def ends_of_tuning() -> AnnotationQuery:
    return _marks(
        "Tuning ended", "green", _changed("job_state", ">", where='state=~"finished|ended"')
    )


def _changed(name: str, comparison: str, where: str = "") -> str:
    """1 in the step in which the metric is another than in the step before, else 0.

    The comparison gives numbers, as Grafana draws no mark where the value is 0; and trial 0 is one.
    """
    now = of_job(name, where=where)
    selector = f"{JOB},{where}" if where else JOB
    before = f"max by (job_name) (bagua_autotune_{name}{{{selector}}} offset $__interval)"
    return f"{now} {comparison} bool {before}"


def _marks(name: str, colour: str, expression: str) -> AnnotationQuery:
    return (
        AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .hide(False)
        .icon_color(colour)
        .expr(expression)
    )
