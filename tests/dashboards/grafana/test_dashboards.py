"""The committed dashboards: what the program writes, whole, and about metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagua_autotune.app import create_app
from bagua_autotune.model import reasons
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.dashboards.grafana.dashboards import FILES, expressions, load, panels
from tests.e2e.monitoring.prometheus import rules

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.grafana.trials.outcome import REASONS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
METRIC = re.compile(r"\b(?:(?:bagua_autotune|process|python)_\w+|job_name:\S+|up(?=\{)|ALERTS)")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}

each_dashboard = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def inside(document: Any) -> Iterator[dict[str, Any]]:
    """Every object of a document, itself included."""
    if isinstance(document, dict):
        yield document
        document = list(document.values())
    if isinstance(document, list):
        for item in document:
            yield from inside(item)


def test_the_committed_files_are_what_the_program_writes() -> None:
    command = [sys.executable, "-m", "dashboards.grafana", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert [path.stem for path in FILES] == ["fleet", "tuning-trials"]


@each_dashboard
def test_the_sdk_reads_it_whole(path: Path) -> None:
    register_default_plugins()
    document = load(path)
    again = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    for annotation in document.get("annotations", {}).get("list", []):
        for name in ("titleFormat", "step", "useValueForTime"):
            assert annotation.pop(name)  # Grafana's Prometheus plug-in knows it, not the SDK
    assert again == document


@each_dashboard
def test_every_panel_says_what_it_shows(path: Path) -> None:
    document = load(path)
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels(document)]
    assert len(set(titles)) == len(titles)
    for panel in panels(document):
        title = panel["title"]
        assert title
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        names = [target["refId"] for target in panel["targets"]]
        assert names, title
        assert len(set(names)) == len(names), title


@each_dashboard
def test_no_data_source_is_hard_coded(path: Path) -> None:
    document = load(path)
    sources = [found["datasource"] for found in inside(document) if "datasource" in found]
    assert sources
    assert all(source == SOURCE for source in sources)
    assert {"datasource": "datasource"}.items() <= {
        variable["name"]: variable["type"] for variable in document["templating"]["list"]
    }.items()
    for panel in panels(document):
        for asking in (panel, *panel["targets"]):
            assert asking["datasource"] == SOURCE, panel["title"]
    for variable in document["templating"]["list"]:
        assert not variable.get("current"), variable["name"]
        assert variable["type"] != "query" or variable["datasource"] == SOURCE


@each_dashboard
def test_panels_do_not_overlap(path: Path) -> None:
    places = [panel["gridPos"] for panel in load(path)["panels"]]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_links_lead_to_dashboards_that_exist() -> None:
    documents = [load(path) for path in FILES]
    urls = [each["url"] for each in inside(documents) if "/d/" in str(each.get("url"))]
    assert urls
    assert {re.match(r"/d/([\w-]+)\?", url)[1] for url in urls} <= {
        each["uid"] for each in documents
    }  # type: ignore[index]
    job = next(url for url in urls if "var-job=" in url)
    assert "&var-datasource=${datasource}&" in job
    tags = [link["tags"] for document in documents for link in document["links"]]
    assert all(set(tag) <= set(documents[0]["tags"]) for tag in tags)


def test_every_metric_and_alert_exists() -> None:
    store = Store("sqlite://")
    app = create_app(Settings(database="sqlite://"), store)
    exposition = app.test_client().get("/metrics").get_data(as_text=True)
    store.close()
    families = list(text_string_to_metric_families(exposition))
    known = {family.name + end for family in families for end in SUFFIXES.get(family.type, ("",))}
    known |= {rule["record"] for rule in rules() if "record" in rule} | {"up", "ALERTS"}
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    shown = set()
    for path in FILES:
        for where, text, _ in expressions(path):
            named = set(METRIC.findall(re.sub(r'"[^"]*"', "", text)))
            assert named, where
            assert named <= known, where
            shown |= set(re.findall(r'alertname="(\w+)"', text))
    assert shown == alerts


def test_only_confirmed_speedups_are_told_as_what_a_job_gained() -> None:
    """While searching, the best trial is partly luck: only the picture of the search shows it."""
    speedup = re.compile(r"bagua_autotune_speedup_(?:lower_|upper_)?ratio(?:\{[^}]*\})?")
    told = []
    for path in FILES:
        for where, asked, _ in expressions(path):
            text = asked.replace("${job:raw}", "job")
            for found in speedup.finditer(text):
                rest = text[found.end() :]
                is_confirmed = re.match(
                    r"\) and on \(job_name\) max by \(job_name\) "
                    r'\(bagua_autotune_job_state\{[^}]*state="finished"[^}]*\}\) == 1',
                    rest,
                )
                told.append(where)
                assert is_confirmed or SEARCH in where, where
    for panel in ("Gained most", "Gained least", "fleet: Speed-up", "tuning-trials: Speed-up"):
        assert any(panel in where for where in told), panel


SEARCH = "Speed-up and its interval"


def test_every_reason_of_a_result_has_words() -> None:
    codes = {reasons.WINNER_CODE, *reasons.REASON_CODES.values()}
    codes |= {code for _, code in reasons.GIVING_UP.values()}
    assert set(REASONS) == codes | {reasons.OTHER_CODE}
