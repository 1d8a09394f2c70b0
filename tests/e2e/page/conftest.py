"""A real service, and a real browser that nobody may complain of."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.autotune.server import ServeProcess
from tests.browser import CHROMIUM, launched
from tests.e2e.page.reading import Seen
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
