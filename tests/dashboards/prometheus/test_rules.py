"""The rules with Prometheus' own checker, and whether they speak of metrics that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bagua_autotune.metrics import Metrics
from bagua_autotune.store import Store
from bagua_autotune.views.summary import Summaries
from tests.e2e.monitoring.prometheus import rules

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "dashboards" / "prometheus"
TESTS = sorted(FOLDER.glob("tests/*.yml"))
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)"
)


def promtool(*arguments: object) -> None:
    found = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


@needs_promtool
def test_the_configuration_is_one_that_prometheus_takes() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    assert TESTS
    promtool("test", "rules", *TESTS)


def test_every_rule_has_a_test() -> None:
    text = "".join(path.read_text() for path in TESTS)
    for alert in alerts():
        assert f'"{alert["alert"]}"' in text or f"alertname: {alert['alert']}" in text


def test_every_alert_says_what_to_do() -> None:
    assert {alert["alert"] for alert in alerts()} == {
        "BaguaAutotuneDown",
        "BaguaAutotuneGone",
        "BaguaAutotuneJobSilent",
        "BaguaAutotuneNotConverging",
        "BaguaAutotuneSpeedupLost",
        "BaguaAutotuneSlowRank",
        "BaguaAutotuneStoreErrors",
        "BaguaAutotuneRefusedTokens",
    }
    for alert in alerts():
        assert {"summary", "description", "runbook"} <= alert["annotations"].keys()
        assert alert["labels"]["severity"] in ("info", "warning")
        assert "for" in alert


def test_rules_speak_of_metrics_that_exist() -> None:
    store = Store("sqlite://")
    text = Metrics(store, Summaries(store)).exposition().decode()
    store.close()
    told = set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
    records = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        texts = [rule["expr"], *rule.get("annotations", {}).values()]
        for name in re.findall(r"(?:[a-z_]+:)?bagua_autotune_[a-z_]+(?::\w+)?", " ".join(texts)):
            metric = re.sub(r"(step_seconds)_(sum|count)$", r"\1", name)
            assert name in records or metric in told, f"{rule} names {name}"
