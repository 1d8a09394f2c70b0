"""What is known of a job is the same wherever it is read: page, terminal, API, Prometheus.

A job is tuned over HTTP by the real tuner; each place is read as its reader would, and every
number that it shows must be the API's, to the digits that it shows.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import pytest
import requests
from playwright.sync_api import Page, expect, sync_playwright
from prometheus_client.parser import text_string_to_metric_families

from bagua_wire.words import describe
from tests.autotune.server import ServeProcess
from tests.browser import CHROMIUM, launched
from tests.e2e.programs.driven_job import DrivenJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM}"),
]
JOB = "drifted"
FACTS = (
    "phase", "configuration", "speed-up", "low", "high", "default's step", "best's step",
    "step now", "trials", "limit", "steps", "cost", "reason", "last heard of",
)  # fmt: skip
UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6}
NUMBER = r"[\d,]*\.?\d+"
Facts = dict[str, str | None]


@pytest.fixture(scope="module")
def page(service: str) -> Iterator[Page]:
    with sync_playwright() as playwright, launched(playwright) as browser:
        context = browser.new_context(base_url=service, timezone_id="UTC")
        yield context.new_page()
        context.close()


def of_api(url: str, job_id: str) -> dict[str, Any]:
    """Numbers as they are; step times in seconds."""
    answer = requests.get(f"{url}/api/v2/jobs/{job_id}/overview", timeout=30)
    answer.raise_for_status()
    overview = answer.json()
    job = overview["job"]
    figures, progress = job["figures"], job["progress"]
    return {
        "phase": job["state"],
        "configuration": job["configuration"],
        "speed-up": figures["speedup"],
        "low": figures["speedup_low"],
        "high": figures["speedup_high"],
        "default's step": figures["baseline_seconds"],
        "best's step": figures["incumbent_seconds"],
        "step now": figures["current_seconds"],
        "trials": progress["trials_measured"],
        "limit": progress["max_trials"],
        "steps": figures["search_steps"],
        "cost": figures["cost_steps"],
        "reason": job["headline"],
        "reason code": job["reason"],
        "last heard of": datetime.fromisoformat(job["last_contact_at"]).timestamp(),
        "result": job["result"],
        "trial": job["trial"],
    }


def of_terminal(url: str, job_id: str) -> Facts:
    """What ``bagua-autotune show`` prints."""
    command = [sys.executable, "-m", "bagua_autotune", "show", job_id, "--url", url]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    heard = datetime.strptime(lines["last heard of"], "%Y-%m-%d %H:%M:%S")
    default, best, now = re.findall(rf"({NUMBER} \S+) (?:by|with|now)", lines["step time"])
    trials, limit = re.findall(NUMBER, lines["trials"])
    steps, cost = re.findall(NUMBER, lines["steps"])
    return {
        "phase": lines[f"job {job_id} ({job_id})"],
        "configuration": lines["runs"],
        **_speedup(lines["speed-up"]),
        **{"default's step": default, "best's step": best, "step now": now},
        **{"trials": trials, "limit": limit, "steps": steps, "cost": cost},
        "reason": lines["in short"],
        "last heard of": str(heard.timestamp()),
    }


def of_page(page: Page, job_id: str) -> Facts:
    """What a browser shows of the job."""
    page.goto(f"/jobs/{job_id}")
    expect(page.locator("#trials tbody tr").first).to_be_visible()
    figures = {
        name: page.locator("#figures > div", has=page.get_by_text(name)).inner_text()
        for name in ("Speed-up", "Step time", "Cost", "Tried")
    }
    details = page.locator("#details > div")
    texts = dict(text.split("\n", 1) for text in details.all_inner_texts())
    rows = page.locator("#trials tbody tr")
    open_trial = rows.filter(has=page.locator(".tag.state"))
    is_open = open_trial.count() > 0
    in_force = open_trial if is_open else rows.filter(has=page.locator(".tag.best")).first
    steps = figures["Step time"]
    shown = re.search(rf"({NUMBER})(?: → ({NUMBER}))? (\S+)", steps)
    assert shown, steps
    default, best, unit = shown[1], shown[2] or shown[1], shown[3]
    now = re.search(rf"now ({NUMBER} \S+)", steps)
    tried = re.findall(NUMBER, figures["Tried"])
    limit, cost = re.search(NUMBER, texts["Limits"]), re.search(NUMBER, figures["Cost"])
    heard = datetime.strptime(f"{texts['Last contact']} +0000", "%d %b %Y, %H:%M:%S %z")
    assert limit
    assert cost
    return {
        "phase": page.locator("#badge").inner_text().partition(",")[0].lower(),
        "configuration": in_force.locator(".configuration").inner_text(),
        **_speedup(figures["Speed-up"]),
        "default's step": f"{default} {unit}",
        "best's step": f"{best} {unit}",
        "step now": now[1] if now else f"{best} {unit}",
        **{"trials": tried[0], "limit": limit[0], "steps": tried[1], "cost": cost[0]},
        "reason": page.locator("#headline").inner_text(),
        "last heard of": str(heard.timestamp()),
    }


def of_metrics(url: str, job_id: str) -> dict[str, Any]:
    """What Prometheus scrapes."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("job_name") == job_id
    ]

    def value(name: str) -> float | None:
        found = [each.value for each in samples if each.name == f"bagua_autotune_{name}"]
        return found[0] if found else None

    def labels(name: str, label: str) -> list[str]:
        of_name = (each for each in samples if each.name == f"bagua_autotune_{name}")
        return [each.labels[label] for each in of_name if each.value == 1]

    def measured(name: str) -> float:
        of_name = (each for each in samples if each.name == f"bagua_autotune_{name}")
        return next(each.value for each in of_name if each.labels["state"] == "measured")

    return {
        "phase": labels("job_state", "state"),
        "configuration": sorted(labels("configuration_info", "state")),
        "speed-up": value("speedup_ratio"),
        "low": value("speedup_lower_ratio"),
        "high": value("speedup_upper_ratio"),
        "default's step": value("baseline_step_seconds"),
        "best's step": value("incumbent_step_seconds"),
        "step now": value("current_step_seconds"),
        "trials": measured("trials"),
        "limit": value("trials_limit"),
        "steps": value("search_steps_total"),
        "cost": value("search_cost_steps"),
        "reason": labels("job_result", "reason"),
        "last heard of": value("job_last_contact_timestamp_seconds"),
    }


def _speedup(text: str) -> Facts:
    times = re.search(rf"({NUMBER})x", text)
    interval = re.search(rf"({NUMBER}) to ({NUMBER})", text)
    assert times, text
    low, high = interval.groups() if interval else (None, None)
    return {"speed-up": times[1], "low": low, "high": high}


def shows(text: str | None, value: float) -> bool:
    """Whether this is the number, with as many decimals as it has, or to three digits."""
    if text is None:
        return False
    number, _, unit = text.replace(",", "").partition(" ")
    decimals = len(number.partition(".")[2])
    return abs(float(number) - value * UNITS.get(unit, 1.0)) <= 0.5001 * 10**-decimals


def check_numbers(place: str, found: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """That all that is shown in words is what is known."""
    for name in FACTS:
        is_a_number = isinstance(known[name], (int, float)) and name != "last heard of"
        if not is_a_number:
            continue
        # An interval of no width is none to a reader.
        if name in ("low", "high") and known["low"] == known["high"]:
            assert found[name] is None, (place, name)
            continue
        assert shows(found[name], known[name]), (place, name, found[name], known[name])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """That tuned a job whose steps take twice as long since."""
    few = {"max_samples": 6, "warmup_seconds": 0, "max_rounds": 1}
    with ServeProcess(tmp_path_factory.mktemp("facts") / "facts.db") as running:
        job = DrivenJob(running.url, JOB, name=JOB, fingerprint=JOB, limits=few)
        job.finish()
        job.drift(2.0)
        yield running.url


def test_every_fact_is_the_same_wherever_it_is_read(service: str, page: Page) -> None:
    known = of_api(service, JOB)
    assert all(known[name] is not None for name in FACTS), known
    assert known["step now"] > 1.2 * known["best's step"], "so that none is taken for the other"
    for place, found in (("terminal", of_terminal(service, JOB)), ("page", of_page(page, JOB))):
        assert found["phase"] == known["phase"], place
        assert found["configuration"] == describe(known["configuration"]), place
        assert found["reason"] == known["reason"], place
        assert float(found["last heard of"] or 0) == int(known["last heard of"]), place
        check_numbers(place, found, known)
    scraped = of_metrics(service, JOB)
    assert scraped["phase"] == [known["phase"]]
    assert scraped["reason"] == [known["reason code"]]
    assert scraped["last heard of"] == pytest.approx(known["last heard of"], abs=1e-3)
    assert len(scraped["configuration"]) == len(known["configuration"])
    assert known["configuration"]["hierarchical"] in scraped["configuration"]
    for name in FACTS:
        if isinstance(known[name], (int, float)) and name != "last heard of":
            assert scraped[name] == pytest.approx(known[name]), name
