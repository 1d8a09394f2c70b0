"""Pages of other sites in a real browser: they neither read nor change anything of a service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from tests.autotune.server import ServeProcess
from tests.browser import CHROMIUM, FLAGS
from tests.e2e.programs.driven_job import DrivenJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM}"),
]
TOKEN = "sésame, open"
# Every way in which a page may send something elsewhere, or look at it.
ATTACK = """async (service) => {
  const job = service + "/api/v2/jobs/job", events = job + "/events";
  const read = [];
  for (const path of ["/", "/metrics", "/api/v2/jobs", "/api/v2/jobs/job/overview"]) {
    const found = await fetch(service + path).catch(() => null);
    if (found && found.ok) read.push(path);
  }
  const body = '{"kind": "ended"}';
  await fetch(events, { method: "POST", mode: "no-cors", body }).catch(() => null);
  await fetch(events, { method: "POST", body }).catch(() => null);
  const headers = { "Content-Type": "application/json" };
  await fetch(events, { method: "POST", headers, body }).catch(() => null);
  await fetch(job, { method: "PUT", headers, body: "{}" }).catch(() => null);
  navigator.sendBeacon(events, body);
  navigator.sendBeacon(events, new Blob([body], { type: "text/plain" }));
  const loaded = (node, source) => new Promise((done) => {
    node.onload = node.onerror = done;
    setTimeout(done, 3000);
    node.src = source;
    document.body.append(node);
  });
  await loaded(document.createElement("script"), service + "/api/v2/jobs");
  await loaded(document.createElement("img"), service + "/metrics");
  const frame = document.createElement("iframe");
  await loaded(frame, service + "/");
  frame.name = "there";
  const form = document.createElement("form");
  Object.assign(form, { method: "post", action: events, enctype: "text/plain", target: "there" });
  const field = document.createElement("input");
  Object.assign(field, { name: '{"kind": "ended", "message": "', value: '"}' });
  form.append(field);
  document.body.append(form);
  const sent = new Promise((done) => { frame.onload = done; setTimeout(done, 3000); });
  form.submit();
  await sent;
  return read;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For which the name of the other site leads to this machine, as after DNS rebinding."""
    names = "--host-resolver-rules=MAP *.example 127.0.0.1"
    # Chromium begins to keep pages from local addresses by itself; other browsers do not.
    open_ = "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*FLAGS, names, open_]
        ) as chromium,
    ):
        yield chromium


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


def at(page: Page, origin: str) -> None:
    """Open a page of that origin, which holds nothing."""

    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="text/html", body="<!doctype html><body></body>")

    page.route(f"{origin}/evil", answer)
    page.goto(f"{origin}/evil")


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://127.0.0.1:9", "http://evil.example:{port}"],
    ids=["another site", "another port of this machine", "a name that leads here"],
)
def test_a_page_of_another_origin_neither_reads_nor_changes_anything(
    page: Page, tmp_path: Path, origin: str
) -> None:
    with ServeProcess(tmp_path / "a.db") as service:
        job = DrivenJob(service.url, "job")
        before = job.session.get(job.path).json()
        port = urlsplit(service.url).port
        origin = origin.format(port=port)
        at(page, origin)
        answers: list[tuple[str, int]] = []
        page.on("response", lambda answer: answers.append((answer.url, answer.status)))
        for target in {service.url, f"http://evil.example:{port}"}:
            assert page.evaluate(ATTACK, target) == []
        assert {status for _, status in answers} == {403}, answers
        assert job.session.get(job.path).json() == before
        assert job.get("events")["events"] == []


def test_the_address_that_a_training_prints_opens_its_page(page: Page, tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "a.db", BAGUA_AUTOTUNE_TOKEN=TOKEN) as service:
        page.goto(f"{service.url}/#token={quote(TOKEN)}")
        expect(page.get_by_role("heading", name="No job yet")).to_be_visible()
        assert page.url == f"{service.url}/"
        page.reload()
        expect(page.get_by_role("heading", name="No job yet")).to_be_visible()
        # The next training's, in the same tab.
        page.goto(f"{service.url}/#token=other")
        expect(page.get_by_text("That token was refused.")).to_be_visible()
        page.goto(f"{service.url}/#token={quote(TOKEN)}")
        expect(page.get_by_role("heading", name="No job yet")).to_be_visible()
