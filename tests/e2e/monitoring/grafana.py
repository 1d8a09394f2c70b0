"""What Grafana makes of the answers of Prometheus: cells of tables, large numbers, marks."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.dashboards.grafana.dashboards import FOLDER, load, panels, substituted
from tests.e2e.monitoring.prometheus import Prometheus

SHORTEST_STEP = 5
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
        """Of a panel of large numbers: the last value of each series."""
        panel = _panel(title)
        assert panel["options"]["reduceOptions"]["calcs"] == ["lastNotNull"]
        found = []
        for target in panel["targets"]:
            text = substituted(target["expr"], self._values)
            if target["instant"]:
                found += [each["value"] for each in self._prometheus.at(text, self._end)]
            else:
                start = self._end - self._past // SHORTEST_STEP * SHORTEST_STEP
                series = self._prometheus.over_time(text, start, self._end, SHORTEST_STEP)
                found += [each["values"][-1] for each in series]
        return [float(value) for _, value in found]

    def table(self, title: str) -> dict[str, dict[str, Any]]:
        """Rows by their first column: tables joined by a label, columns renamed."""
        panel = _panel(title)
        settings = {each["id"]: each["options"] for each in panel["transformations"]}
        label, organized = settings["joinByField"]["byField"], settings["organize"]
        rows: dict[str, dict[str, Any]] = {}
        for target in panel["targets"]:
            assert target["instant"]
            text = substituted(target["expr"], self._values)
            for series in self._prometheus.at(text, self._end):
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


def _panel(title: str) -> dict[str, Any]:
    (panel,) = (each for each in panels(DASHBOARD) if each["title"] == title)
    return panel
