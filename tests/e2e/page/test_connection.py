"""What the page asks of the service, when, and what it says without an answer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.page.conftest import HIDE, TOKEN, Seen, figure
from tests.e2e.programs.driven_job import DrivenJob

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_nothing_is_asked_while_the_tab_is_hidden(page: Page, url: str, seen: Seen) -> None:
    DrivenJob(url, "watched", fingerprint="watched")
    page.clock.install()
    page.goto("/jobs/watched")
    expect(page.locator("#connection")).to_have_text("Live")
    before = seen.polls()
    for _ in range(3):
        with page.expect_response("**/overview") as answer:
            page.clock.run_for(1000)
        assert answer.value.status == 304
        expect(page.locator("#connection")).to_have_text("Live")
    assert seen.polls() >= before + 3
    page.evaluate(HIDE, True)
    expect(page.locator("#connection")).to_have_text("Paused")
    before = seen.polls()
    page.clock.run_for(60_000)
    assert seen.polls() == before
    with page.expect_response("**/overview"):
        page.evaluate(HIDE, False)
    expect(page.locator("#connection")).to_have_text("Live")


def test_silence_is_by_the_clock_of_the_service_and_announced_once(page: Page, url: str) -> None:
    DrivenJob(url, "silent", fingerprint="silent")
    page.clock.install(time=time.time() + 10_000)
    page.goto("/jobs/silent")
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#warnings")).to_be_empty()
    page.clock.fast_forward(72_000)  # 2 s more: the service tells whole seconds
    expect(page.locator("#warnings")).to_contain_text(
        "heard nothing from this training for 1 min 10 s"
    )
    announced = page.locator("#announced").inner_text()
    assert "1 min 10 s" in announced
    page.clock.fast_forward(20_000)
    expect(page.locator("#warnings")).to_contain_text("1 min 30 s")
    assert page.locator("#announced").inner_text() == announced


def test_a_service_that_does_not_answer_is_named_and_waited_for(
    page: Page, tuned: DrivenJob, seen: Seen
) -> None:
    page.clock.install()
    page.goto("/jobs/tuned")
    expect(page.locator("#connection")).to_have_text("Live")
    page.context.set_offline(True)
    page.clock.run_for(6000)
    expect(page.locator("#trouble")).to_contain_text("has not answered")
    expect(page.locator("#headline")).to_be_visible()
    page.context.set_offline(False)
    page.clock.run_for(3000)
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#trouble")).to_be_hidden()
    assert all("ERR_INTERNET_DISCONNECTED" in complaint for complaint in seen.complaints)
    seen.complaints.clear()


def test_an_unknown_job_is_named_and_asked_for_once_a_minute(page: Page, seen: Seen) -> None:
    page.clock.install()
    page.goto("/jobs/nobody")
    expect(page.get_by_role("main").get_by_role("heading", level=1)).to_have_text("No such job")
    # The page's clock goes on by itself as well, so 25 s are left for a busy machine.
    page.clock.run_for(30_000)
    assert seen.polls() == len(seen.complaints) == 1
    with page.expect_console_message(lambda message: "404" in message.text):
        page.clock.run_for(35_000)
    assert seen.polls() == len(seen.complaints) == 2
    expect(page.get_by_role("heading", level=1)).to_have_text("No such job")
    assert all("404" in complaint for complaint in seen.complaints)
    seen.complaints.clear()
    page.get_by_role("link", name="All jobs").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")


def test_a_token_is_asked_for_and_kept_to_itself(browser: Browser, guarded_url: str) -> None:
    context = browser.new_context(base_url=guarded_url)
    page = context.new_page()
    seen = Seen()
    seen.watch(page)
    page.goto("/")
    for token in ("wrong", TOKEN):
        page.get_by_label("Token").fill(token)
        page.get_by_role("button", name="Show the jobs").click()
        if token == "wrong":
            expect(page.get_by_role("alert").filter(has_text="refused")).to_be_visible()
    expect(page.get_by_role("heading", name="No job yet")).to_be_visible()
    expect(page.locator("#start")).to_contain_text(f"BAGUA_AUTOTUNE_URL={guarded_url}")
    DrivenJob(guarded_url, "secret", token=TOKEN, name="secret").run_trials(1)
    page.goto("/jobs/secret")
    expect(figure(page, "Tried")).to_have_text("1 trial")
    with page.expect_download() as begun:
        page.get_by_role("button", name="Download CSV").click()
    assert Path(begun.value.path()).read_text().startswith("index,")
    assert TOKEN not in page.content()
    assert not any("open" in request.url for request in seen.requests)
    assert context.cookies() == []
    assert page.evaluate("localStorage.length") == 0
    page.get_by_role("button", name="Forget token").click()
    expect(page.get_by_label("Token")).to_be_empty()
    context.close()
