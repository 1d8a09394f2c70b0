"""What Grafana makes of the answers of Prometheus: cells of tables, large numbers, marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.dashboards.grafana.dashboards import FOLDER, load, panels, substituted
from tests.e2e.prometheus import Prometheus

DASHBOARD = load(FOLDER / "tuning-trials.json")


class Mark(NamedTuple):
    """Of an annotation: ``end`` is ``start`` unless neighbours became one. Seconds."""

    title: str
    start: float
    end: float


class View:
    """The dashboard of one job, of the ``past_seconds`` until ``end``."""

    def __init__(self, prometheus: Prometheus, job: str, end: float, past_seconds: int) -> None:
        self._prometheus, self._end, self._past = prometheus, end, past_seconds
        self._values = {"job": job, "__range": f"{past_seconds}s"}

    def numbers(self, title: str) -> list[float]:
        """Of a panel all of whose queries are about the end of the time shown."""
        return [
            float(series["value"][1])
            for target in _panel(title)["targets"]
            for series in self._instant(target)
        ]

    def table(self, title: str) -> dict[str, dict[str, Any]]:
        """Rows by their first column: tables joined by a label, columns renamed."""
        panel = _panel(title)
        settings = {each["id"]: each["options"] for each in panel["transformations"]}
        label, organized = settings["joinByField"]["byField"], settings["organize"]
        rows: dict[str, dict[str, Any]] = {}
        for target in panel["targets"]:
            for series in self._instant(target):
                row = rows.setdefault(series["metric"][label], {})
                value = {f"Value #{target['refId']}": float(series["value"][1])}
                row |= {
                    organized["renameByName"].get(name, name): cell
                    for name, cell in {**series["metric"], **value}.items()
                    if not organized["excludeByName"].get(name)
                }
        return rows

    def marks(self, name: str, step: int) -> list[Mark]:
        """Of an annotation, where points are so many seconds apart; in order of their times."""
        (annotation,) = (each for each in DASHBOARD["annotations"]["list"] if each["name"] == name)
        assert annotation["useValueForTime"]
        text = substituted(annotation["expr"], {**self._values, "__interval": f"{step}s"})
        first = (self._end - self._past) // step * step
        found = []
        for series in self._prometheus.over_time(text, first, self._end, step):
            title = annotation["titleFormat"]
            for label, value in series["metric"].items():
                title = title.replace(f"{{{{{label}}}}}", value)
            merged: list[Mark] = []
            for _, value in series["values"]:
                at = float(value) / 1000
                if merged and merged[-1].end + step >= at:
                    merged[-1] = merged[-1]._replace(end=at)
                else:
                    merged.append(Mark(title, at, at))
            found += merged
        return sorted(found, key=lambda mark: mark.start)

    def _instant(self, target: Mapping[str, Any]) -> list[dict[str, Any]]:
        assert target["instant"]
        return self._prometheus.at(substituted(target["expr"], self._values), self._end)


def _panel(title: str) -> dict[str, Any]:
    (panel,) = (each for each in panels(DASHBOARD) if each["title"] == title)
    return panel
