"""The list of jobs; and both pages on narrow and dark screens, by keyboard, and without motion."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.e2e.page.conftest import AUDIT, Seen, as_milliseconds
from tests.e2e.programs.driven_job import DrivenJob

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
# In the order of the document: what can be used and is seen, as a reader would point at it.
NAME = "(node) => `${node.tagName}#${node.id} ${node.className} ${node.textContent.slice(0, 30)}`"
REACHABLE = f"""() => [...document.querySelectorAll("a, button, select, summary, [tabindex='0']")]
    .filter((node) => node.checkVisibility()).map({NAME})"""
FOCUSED = f"""() => [
    ({NAME})(document.activeElement), getComputedStyle(document.activeElement).outlineStyle
]"""


def shown_as(job: Any, name: str, state: str, speedup: float, silent_seconds: float) -> Any:
    heard = datetime.now(timezone.utc) - timedelta(seconds=silent_seconds)
    changed = {**job, "id": name, "name": name, "state": state, "headline": name}
    changed["last_contact_at"] = heard.isoformat()
    changed["figures"] = {**job["figures"], "speedup": speedup}
    return changed if state == "finished" else {**changed, "result": None}


def test_silent_jobs_and_unconfirmed_results_look_it_and_sort_below(
    page: Page, tuned: DrivenJob
) -> None:
    job = tuned.get("overview")["job"]
    jobs = [
        shown_as(job, "silent", "tuning", 1.9, 120),
        shown_as(job, "tuning", "tuning", 1.8, 3),
        shown_as(job, "small", "finished", 1.1, 7000),
        shown_as(job, "lost", "lost", 1.7, 400),
        shown_as(job, "large", "finished", 1.4, 9000),
        shown_as(job, "ended", "ended", 1.5, 500),
    ]
    page.route("**/jobs?limit=*", lambda route: route.fulfill(json={"jobs": jobs}))
    page.goto("/")
    names = page.locator("#jobs .job a")
    expect(names).to_have_text(["tuning", "ended", "small", "large", "silent", "lost"])
    head = page.locator("#jobs th", has_text="Speed-up").get_by_role("button")
    head.click()
    expect(names).to_have_text(["large", "small", "tuning", "ended", "silent", "lost"])
    head.click()
    expect(names).to_have_text(["small", "large", "ended", "tuning", "lost", "silent"])
    rows = page.locator("#jobs tbody tr")
    for name, is_confirmed in (("tuning", False), ("ended", False), ("large", True)):
        cell = rows.filter(has=page.get_by_role("link", name=name)).locator("td.speedup")
        assert ("not confirmed" in cell.inner_text()) is not is_confirmed
        assert cell.locator("b").count() == is_confirmed
    expect(rows.filter(has_text="Tuning, silent")).to_have_count(1)
    page.get_by_label("Filter the jobs shown by state").select_option("silent")
    expect(names).to_have_text(["lost", "silent"])


def test_sort_and_filter_are_kept_in_the_address(page: Page, url: str, tuned: DrivenJob) -> None:
    figures = tuned.get("overview")["job"]["figures"]
    DrivenJob(url, "linked", name="resnet-again", fingerprint="linked")
    page.goto("/")
    names = page.locator("#jobs .job a")
    page.locator("#jobs th", has_text="Job").get_by_role("button").click()
    page.get_by_label("Filter the jobs shown by name").fill("resnet")
    page.get_by_label("Filter the jobs shown by state").select_option("lost")
    expect(page.get_by_text("None of the jobs shown has this name and state.")).to_be_visible()
    page.get_by_label("Filter the jobs shown by state").select_option("finished")
    expect(names).to_have_text(["resnet50"])
    expect(page.locator("#jobs .speedup b")).to_have_text(f"{figures['speedup']:.2f}x")
    before, best = (figures[f"{which}_seconds"] for which in ("baseline", "incumbent"))
    expect(page.locator("#jobs td.step")).to_have_text(
        f"{as_milliseconds(before)} \u2192 {as_milliseconds(best)} ms"
    )
    address = page.url
    assert address.endswith("/?sort=name&filter=resnet&state=finished")
    # A link shows the same, as does the way back from a job.
    names.first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("resnet50")
    page.go_back()
    expect(page).to_have_url(address)
    expect(names).to_have_text(["resnet50"])
    expect(page.get_by_label("Filter the jobs shown by name")).to_have_value("resnet")
    expect(page.locator("#jobs th", has_text="Job")).to_have_attribute("aria-sort", "ascending")
    page.get_by_label("Filter the jobs shown by state").select_option("")
    expect(names).to_have_text(["resnet-again", "resnet50"])
    page.goto("/?state=nonsense&sort=nonsense")
    expect(page.get_by_label("Filter the jobs shown by state")).to_have_value("")
    expect(names.filter(has_text="resnet50")).to_be_visible()


def test_of_many_jobs_the_newest_are_shown_first(page: Page, tuned: DrivenJob, seen: Seen) -> None:
    job = tuned.get("overview")["job"]

    def answer(route: Route) -> None:
        limit = int(route.request.url.rpartition("=")[2])
        jobs = [{**job, "id": f"job-{n}", "name": f"job-{n}"} for n in range(min(limit, 130))]
        route.fulfill(json={"jobs": jobs})

    page.route("**/jobs?limit=*", answer)
    page.clock.install()
    page.goto("/")
    expect(page.locator("#jobs tbody tr")).to_have_count(100)
    expect(page.locator("#count")).to_have_text("the newest 100 jobs")
    page.get_by_role("button", name="Show older jobs").click()
    expect(page.locator("#jobs tbody tr")).to_have_count(130)
    expect(page.locator("#count")).to_have_text("130 jobs")
    expect(page.get_by_role("button", name="Show older jobs")).to_be_hidden()
    before = len(seen.requests)
    page.clock.run_for(9000)
    assert len(seen.requests) == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_all_of_it_legibly(page: Page, tuned: DrivenJob, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 375, "height": 800})
    for path in ("/", "/jobs/tuned"):
        page.goto(path)
        expect(page.locator("#content")).to_be_visible()
        expect(page.locator("#jobs tbody tr, #trials tbody tr").first).to_be_visible()
        expect(page.locator("#jobs, #importance-panel")).to_be_visible()
        assert page.evaluate(AUDIT) == []
    cut_off = "all => all.filter(each => each.scrollWidth > each.clientWidth).length"
    assert page.locator("pre:visible").evaluate_all(cut_off) == 0
    heads = [
        page.locator(f"#trials th.{kind} button").bounding_box() for kind in ("step", "speedup")
    ]
    right = [round(box["x"] + box["width"]) for box in heads if box]
    assert right[0] == right[1]


def test_the_keyboard_reaches_all_that_can_be_used_and_shows_where_it_is(
    page: Page, tuned: DrivenJob
) -> None:
    del tuned
    page.goto("/jobs/tuned")
    expect(page.locator("#importance-panel")).to_be_visible()
    expect(page.locator(".bucket-bar")).to_have_count(2)
    wanted = page.evaluate(REACHABLE)
    reached = []
    for _ in range(len(wanted)):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(FOCUSED)
        assert outline != "none", name
        reached.append(name)
    assert reached == wanted
    page.get_by_label("Knob that the trials are shown by").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#knob")).to_have_value("hierarchical")


def test_who_wants_no_motion_sees_none(page: Page, url: str) -> None:
    DrivenJob(url, "still", name="still", fingerprint="still")
    moves = "() => document.getAnimations().map((one) => one.animationName)"
    for motion, moving in (("no-preference", ["breathe"]), ("reduce", [])):
        page.emulate_media(reduced_motion=motion)
        page.goto("/jobs/still")
        expect(page.locator("#badge")).to_have_text("Tuning")
        assert page.evaluate(moves) == moving
