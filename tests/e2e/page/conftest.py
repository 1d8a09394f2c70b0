"""A real service, and a real browser that nobody may complain of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.autotune.server import ServeProcess
from tests.browser import CHROMIUM, launched
from tests.e2e.programs.driven_job import DrivenJob

TOKEN = "sésame, open"
QUICK_LIMITS = {
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.01",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ended before other tests run: while Playwright runs, its thread has an event loop."""
    if not CHROMIUM.exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    with sync_playwright() as playwright, launched(playwright) as chromium:
        yield chromium


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    database = tmp_path_factory.mktemp("page") / "page.db"
    with ServeProcess(database, "--world-size", "2", **QUICK_LIMITS) as service:
        yield service.url


@pytest.fixture(scope="module")
def guarded_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a service that needs a token, and has no job."""
    database = tmp_path_factory.mktemp("guarded") / "page.db"
    with ServeProcess(database, BAGUA_AUTOTUNE_TOKEN=TOKEN) as service:
        yield service.url


@pytest.fixture(scope="module")
def tuned(url: str) -> DrivenJob:
    """A job that is tuned to its end."""
    job = DrivenJob(url, "tuned", name="resnet50", limits={"max_samples": 5})
    job.finish()
    return job


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Browser, url: str, seen: Seen) -> Iterator[Page]:
    """Nothing may be complained of, and nothing asked of another host."""
    context = browser.new_context(base_url=url, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(20_000)
    seen.watch(page)
    yield page
    context.close()
    assert seen.complaints == []
    hosts = {urlsplit(request.url).netloc for request in seen.requests if ":" in request.url}
    assert hosts - {urlsplit(url).netloc} <= {""}  # blob: and data: have none


HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
# Of every visible text the contrast with what is behind it (WCAG 2.2, 1.4.3), and what is wider
# than the screen; both as what a reader would point at.
AUDIT = (Path(__file__).parent / "audit.js").read_text()


@dataclass
class Seen:
    """What a page did that nobody asked for."""

    complaints: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.on("request", lambda request: self.requests.append(request))

    def polls(self) -> int:
        return sum(request.url.endswith("/overview") for request in self.requests)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def figure(page: Page, name: str) -> Any:
    return page.locator("#figures > div", has_text=name).locator("dd").first


def read_points(page: Page, plot: str) -> list[str]:
    """What the keyboard reads of a plot, from its first point to its last."""
    canvas, tip = page.locator(f"{plot} .canvas"), page.locator(f"{plot} .tip")
    expect(canvas.locator("canvas")).to_be_visible()
    canvas.focus()
    page.keyboard.press("Home")
    found: list[str] = []
    while not found or found[-1] != tip.inner_text():
        found.append(tip.inner_text())
        page.keyboard.press("ArrowRight")
    return found


def milliseconds(text: str) -> list[str]:
    return re.findall(r"([\d.]+)(?= ms| to )", text)


def as_milliseconds(seconds: float) -> str:
    """To three digits, as the page has it."""
    return f"{seconds * 1e3:.0f}" if seconds >= 0.09995 else f"{seconds * 1e3:.1f}"
