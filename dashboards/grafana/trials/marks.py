"""Marks on all panels of one job: each change of its configuration, and each end of tuning."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import AnnotationQuery
from grafana_foundation_sdk.models import dashboard as models

from dashboards.grafana.queries import JOB, SOURCE, of_job

# Between two trials none may run, while the service decides.
LOOKBACK = "10m"


class _TitledAnnotation(models.AnnotationQuery):
    """Grafana's Prometheus plug-in knows a title, which the SDK does not; its texts are empty."""

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "titleFormat": self.name}


class _Mark(AnnotationQuery):
    def __init__(self, name: str, colour: str, expression: str) -> None:
        self._internal = _TitledAnnotation(
            name=name, datasource=SOURCE, icon_color=colour, expr=expression
        )


def configuration_changes() -> AnnotationQuery:
    return _Mark("New configuration", "rgba(115, 150, 220, 0.7)", _changed("current_trial", "!="))


def ends_of_tuning() -> AnnotationQuery:
    ends = _changed("job_state", ">", where='state=~"finished|ended"')
    return _Mark("Tuning ended", "green", ends)


def _changed(name: str, comparison: str, where: str = "") -> str:
    """1 in the step in which the metric is another than it was before, else 0.

    The comparison gives numbers, as Grafana draws no mark where the value is 0; and trial 0 is one.
    """
    selector = f"bagua_autotune_{name}{{{f'{JOB},{where}' if where else JOB}}}"
    before = f"last_over_time({selector}[{LOOKBACK}] offset $__interval)"
    return f"{of_job(name, where=where)} {comparison} bool max by (job_name) ({before})"
