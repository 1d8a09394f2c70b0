"""Dashboards and rules on a real Prometheus that scrapes the service of a real tuning."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests

from bagua_wire.knobs import RECOMPUTED_KNOB
from tests.dashboards.grafana.dashboards import (
    FILES,
    FOLDER,
    Expression,
    expressions,
    load,
    panels,
    substituted,
)
from tests.e2e.monitoring.prometheus import (
    SCRAPE_MILLISECONDS,
    Prometheus,
    holding,
    rules,
    scraping,
)
from tests.e2e.programs.driven_job import DrivenJob
from tests.e2e.programs.training import train_two
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool
from tests.waiting import wait_until

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


PROGRAM = shutil.which("prometheus")
PAST_SECONDS = 120
SCRAPE_SECONDS, IDLE_SCRAPES = 5, 10  # as the dashboards expect it
HOSTILE = """it's "C:\\d\\" $job {a="b"} or up"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(PROGRAM is None, reason="no prometheus here (apt-get install prometheus)"),
]


def all_expressions(job_name: str) -> list[Expression]:
    """Of dashboards, as Grafana sends them, for scrapes as fast as those here; of rules."""
    values = {
        "job": job_name,
        "__interval": "5s",  # What is shown only so long survives a late scrape.
        "__rate_interval": "4s",
        "__range": f"{PAST_SECONDS}s",
    }
    expected, here = f":{SCRAPE_SECONDS}s]", f":{SCRAPE_MILLISECONDS}ms]"
    found = [
        Expression(where, substituted(text, values).replace(expected, here), instant)
        for path in FILES
        for where, text, instant in expressions(path)
        if RECOMPUTED_KNOB not in text  # The models here recompute nothing.
    ]
    for rule in rules():
        text = rule["expr"]
        if "alert" in rule:
            # An alert that does not fire has no samples, but its comparison has: 0.
            text = re.sub(r"([<>]=?|[=!]=)(?= *[\d.]+)", r"\1 bool", text)
        found.append(Expression(rule.get("record") or rule["alert"], text, True))
    return found


def test_every_expression_of_dashboards_and_rules_returns_samples(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    assert PROGRAM
    service.start()

    def train() -> None:
        pool = tuned_ranks(service.url, (2,), BAGUA_AUTOTUNE_FRESH="1")
        pool.run(train_two, 0.03, 0.02, timeout_seconds=200)
        pool.close()

    address = service.url.removeprefix("http://")
    with scraping(PROGRAM, tmp_path, address) as prometheus, ThreadPoolExecutor() as threads:
        training = threads.submit(train)
        wait_until(lambda: bool(service.get("jobs")["jobs"]), "the registration", 100)
        pending = all_expressions(min(job["name"] for job in service.get("jobs")["jobs"]))
        assert len(pending) > 100
        deadline = time.monotonic() + 150
        while pending:
            assert time.monotonic() < deadline, pending
            if training.done():
                training.result()  # says what went wrong, if anything did
                # Step times of a trial are known for a moment, which every scrape may have missed.
                training = threads.submit(train)
            time.sleep(0.5)
            pending = [
                each
                for each in pending
                if not prometheus.values(each.text, 0 if each.instant else PAST_SECONDS)
            ]
        states = {job["name"]: job["state"] for job in service.get("jobs")["jobs"]}
        failing = prometheus.failing_rules()
    assert "finished" in states.values()
    assert failing == []


class ScrapedJob(DrivenJob):
    """A job whose service is scraped after everything that happens, 5 s apart on its own clock.

    Attributes:
        scrapes: by their times.
    """

    steps_of_a_report = 1  # so that no trial is over before it was scraped

    def __init__(self, service: ServiceProcess, **changes: Any) -> None:
        self._metrics = f"{service.url}/metrics"
        self._told = -1
        self.now = int(time.time()) // 3600 * 3600 - 3600
        self.scrapes: dict[int, str] = {}
        super().__init__(service.url, "job", **changes)
        self._scrape()

    def train_on(self) -> None:
        for _ in range(IDLE_SCRAPES):
            self._scrape()

    def _report(self, count: int | None = None) -> None:
        running = self.state
        if running["trial"]["index"] > self._told:
            self._told = running["trial"]["index"]
            self._tell(kind="switched", trial=self._told, seconds=0.01)
        self.state = running  # What follows may be known by now, but these are its steps.
        super()._report(count)

    def _take(self, response: requests.Response) -> None:
        super()._take(response)
        if not self.state["deciding"]:
            self._scrape()

    def _scrape(self) -> None:
        self.now += SCRAPE_SECONDS
        self.scrapes[self.now] = self.session.get(self._metrics).text

    def first(self, pattern: str) -> dict[str, int]:
        """When each text that is the group of the pattern was first scraped."""
        found: dict[str, int] = {}
        for moment, text in self.scrapes.items():
            for value in re.findall(pattern, text, re.MULTILINE):
                found.setdefault(value, moment)
        return found


def test_trials_and_marks_are_those_of_the_api_over_two_rounds(
    service: ServiceProcess, tmp_path: Path
) -> None:
    assert PROGRAM
    service.start()
    job = ScrapedJob(service, name=HOSTILE, limits={"max_samples": 6})
    job.finish()
    ended = [job.now]
    figures = job.get("overview")["job"]["figures"]
    job.train_on()
    tuned = job.now
    job.drift(2.8)
    tuned_again = job.now
    job.finish()
    ended.append(job.now)
    job.train_on()
    overview = job.get("overview")
    past = job.now - min(job.scrapes) + 60
    with holding(PROGRAM, tmp_path, job.scrapes) as prometheus:
        whole = View(prometheus, HOSTILE, job.now, past)
        rows = whole.table("Trials")
        points = whole.table("Bucket size against time of a step")
        steps = [SCRAPE_SECONDS, 30]  # as the dashboard says, and as Grafana makes it for an hour
        marks = [whole.marks("New configuration", step) for step in steps]
        ends = [whole.marks("Tuning ended", step) for step in steps]
        of_result = ("Speed-up", "95 % interval", "Why the tuning ended", "Cost of the search")
        known = [
            [title for title in of_result if View(prometheus, HOSTILE, end, past).numbers(title)]
            for end in (tuned, tuned_again, job.now)
        ]
        before = View(prometheus, HOSTILE, tuned, past)
        assert before.numbers("Steps of the search") == [figures["search_steps"]]
        assert before.numbers("Time of the search") == pytest.approx([figures["search_seconds"]])
    assert known == [list(of_result), [], list(of_result)]
    trials = overview["trials"]
    assert {trial["round"] for trial in trials} == {0, 1}
    assert rows.keys() == points.keys() == {str(trial["index"]) for trial in trials}
    for trial in trials:
        row, point = rows[str(trial["index"])], points[str(trial["index"])]
        assert row["Time of a step"] == point["Time of a step"]
        assert row["Time of a step"] == pytest.approx(trial["seconds"], rel=0.05)
        assert row["Bucket size"] == point["Bucket size"] == trial["configuration"]["bucket_bytes"]
        assert row["Against the default"] == pytest.approx(trial["speedup"], rel=0.05)
        if trial["configuration"] == overview["default_configuration"]:
            assert row["Against the default"] == pytest.approx(1, abs=0.05)
    assert {a["step"] for a in DASHBOARD["annotations"]["list"]} == {f"{SCRAPE_SECONDS}s"}
    began = job.first(r"^bagua_autotune_current_trial\{.*\} (\d+)")
    for found in marks:
        assert [(mark.title, mark.start) for mark in found] == [
            (f"Trial {number}", moment) for number, moment in began.items()
        ]
        assert all(mark.start == mark.end for mark in found)
    assert [[mark.start for mark in found] for found in ends] == [ended] * len(steps)
