"""Dashboards and rules on a real Prometheus that scrapes the service of a real tuning."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.dashboards.grafana.dashboards import FILES, Expression, expressions, substituted
from tests.e2e.conftest import wait_until
from tests.e2e.prometheus import Prometheus, rules
from tests.e2e.service import ServiceProcess
from tests.e2e.training import train_two
from tests.ranks import RankPool

PROGRAM = shutil.which("prometheus")
PAST_SECONDS = 120

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROGRAM is None, reason="no prometheus here (apt-get install prometheus)"),
]


def all_expressions(job_name: str) -> list[Expression]:
    """Of dashboards, as Grafana sends them where scrapes are a second apart; of rules."""
    values = {
        "job": job_name,
        "__interval": "1s",
        "__rate_interval": "4s",
        "__range": f"{PAST_SECONDS}s",
    }
    found = [
        Expression(where, substituted(text, values), instant)
        for path in FILES
        for where, text, instant in expressions(path)
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
    pool = tuned_ranks(service.url, (2,))
    address = service.url.removeprefix("http://")
    with Prometheus(PROGRAM, tmp_path, address) as prometheus, ThreadPoolExecutor() as threads:
        training = threads.submit(pool.run, train_two, 0.05, timeout_seconds=200)
        wait_until(lambda: bool(service.get("jobs")["jobs"]), "the registration", 100)
        pending = all_expressions(service.get("jobs")["jobs"][-1]["name"])
        assert len(pending) > 100
        deadline = time.monotonic() + 150
        while pending:
            assert time.monotonic() < deadline, pending
            if training.done():
                training.result()  # says what went wrong, if anything did
            time.sleep(0.5)
            pending = [
                each
                for each in pending
                if not prometheus.values(each.text, 0 if each.instant else PAST_SECONDS)
            ]
        states = {job["name"]: job["state"] for job in service.get("jobs")["jobs"]}
        failing = prometheus.failing_rules()
        pool.close()
    assert "finished" in states.values()
    assert failing == []
