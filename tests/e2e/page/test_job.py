"""One job's page, while it is tuned and afterwards."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.page.reading import figure, read_points
from tests.e2e.programs.driven_job import DrivenJob, run_bagua_job

pytestmark = [pytest.mark.slow, pytest.mark.e2e]
HOSTILE = "<img src=x onerror=alert(1)>"
TIMES = re.compile(r"\d\.\d\dx")


def now(page: Page) -> list[Any]:
    """What runs now in words, how far the bar is, and the words below it."""
    share = page.locator("#progress").evaluate("bar => bar.position")
    words = page.locator("#now-words").inner_text()
    return [words, share, page.locator("#progress-words").inner_text()]


def test_the_page_follows_a_tuning_without_being_loaded_again(page: Page, url: str) -> None:
    job = DrivenJob(url, "live", name="live", fingerprint="live", limits={"max_samples": 5})
    page.goto("/jobs/live")
    expect(figure(page, "Speed-up")).to_have_text("\u2013")
    page.evaluate("window.isSame = true")
    expect(page.locator("#now-phase")).to_contain_text("the default is measured")
    assert now(page)[:2] == ["bucket 25 MiB, flat default", 0.0]
    job.run_trials(1)
    expect(page.locator("#figures")).to_contain_text("of the default, the best so far")
    job.run_trials(2)
    expect(figure(page, "Tried")).to_have_text("3 trials")
    expect(page.locator("#now-phase")).to_contain_text("Search: ")
    progress = job.get("overview")["job"]["progress"]
    words, share, text = now(page)
    assert words.removesuffix(" default") == job.get("overview")["trials"][3]["words"]
    assert share == pytest.approx(3 / progress["max_trials"])
    # As the headline counts them.
    assert text.startswith(f"Trial 4 of at most {progress['max_trials']}, 3 trials measured in all")
    expect(page.locator("#headline")).to_contain_text("trial 4 of at most 5")
    before = page.locator("#headline").inner_text()
    job.finish()
    expect(page.locator("#badge")).to_have_text("Finished")
    result = job.get("overview")["job"]["result"]
    expect(figure(page, "Speed-up")).to_have_text(f"{result['speedup']:.2f}x")
    expect(page.locator("#figures")).to_contain_text(f"{result['low']:.2f} to {result['high']:.2f}")
    expect(page.locator("#headline")).to_have_text(job.get("overview")["job"]["headline"])
    expect(page.locator("#now-phase")).to_contain_text("Tuning is finished")
    assert now(page)[1:] == [1.0, f"{result['trials']} trials measured"]
    assert page.locator("#headline").inner_text() != before
    assert page.evaluate("window.isSame")


def test_the_table_is_sorted_by_click_and_by_key(page: Page, tuned: DrivenJob) -> None:
    overview = tuned.get("overview")
    trials = overview["trials"]
    page.goto("/jobs/tuned")
    rows = page.locator("#trials tbody tr td.index")
    expect(rows).to_have_text([str(trial["index"]) for trial in trials])
    head = page.locator("#trials th", has_text="Step time")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    fastest_first = sorted(trials, key=lambda trial: trial["seconds"])
    expect(rows).to_have_text([str(trial["index"]) for trial in fastest_first])
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(rows).to_have_text([str(trial["index"]) for trial in reversed(fastest_first)])
    # By size, whatever its unit.
    small = {"bucket_bytes": 512 * 1024, "hierarchical": "off"}
    trials[1] |= {"configuration": small, "words": "bucket 512 KiB, flat"}
    page.route("**/overview", lambda route: route.fulfill(json={**overview, "trials": trials}))
    page.goto("/jobs/tuned")
    expect(rows).to_have_count(len(trials))
    head = page.locator("#trials th", has_text="Configuration")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    sizes = {str(trial["index"]): trial["configuration"]["bucket_bytes"] for trial in trials}
    shown = [sizes[index] for index in rows.all_inner_texts()]
    assert shown == sorted(shown)


def test_downloads_are_the_api_s(page: Page, tuned: DrivenJob) -> None:
    page.goto("/jobs/tuned")
    for button, path in (("Download CSV", "trials.csv"), ("Download JSON", "export.json")):
        with page.expect_download() as begun:
            page.get_by_role("button", name=button).click()
        text = Path(begun.value.path()).read_text()
        assert text == tuned.session.get(f"{tuned.path}/{path}").text
        assert begun.value.suggested_filename.startswith("resnet50")
        is_json = path.endswith("json")
        rows = json.loads(text)["trials"] if is_json else list(csv.DictReader(io.StringIO(text)))
        assert len(rows) == len(tuned.get("trials")["trials"])


def test_the_snippet_can_be_copied(page: Page, tuned: DrivenJob) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto("/jobs/tuned")
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == tuned.get("overview")["stock_ddp"]
    command = "bagua-autotune export tuned --configuration > tuned.json"
    expect(page.locator("#without-service")).to_contain_text(f"without a service: {command}")


def test_what_a_client_says_is_only_ever_text(page: Page, url: str) -> None:
    tensors = [{"name": HOSTILE, "elements": 9, "bytes": 36, "dtype": HOSTILE, "group": "g"}]
    job = DrivenJob(
        url, "hostile", name=HOSTILE, software={HOSTILE: HOSTILE}, fingerprint=HOSTILE,
        tensors=tensors,
    )  # fmt: skip
    note = {"kind": "note", "message": HOSTILE}
    job.session.post(f"{job.path}/events", json=note).raise_for_status()
    page.goto("/")
    page.get_by_role("link", name=HOSTILE).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    expect(page.locator("#events")).to_contain_text(HOSTILE)
    expect(page.locator("#details")).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0


def test_a_job_without_step_times_says_why(page: Page, url: str) -> None:
    run_bagua_job(url, "bagua", 8)
    page.goto("/")
    page.get_by_role("link", name="bagua", exact=True).click()
    expect(figure(page, "Speed-up")).to_contain_text(TIMES)
    expect(page.locator("#figures")).to_contain_text("report a speed, not seconds")
    texts = read_points(page, "#best-plot")
    assert len(texts) > 1
    assert all(TIMES.search(text) and "ms" not in text for text in texts)
    expect(page.locator("#steps-panel")).to_be_hidden()
    names = [name.lower() for name in page.locator("#details dt").all_inner_texts()]
    assert len(names) == len(set(names))


def test_a_job_that_ends_before_a_result_claims_none(page: Page, url: str) -> None:
    job = DrivenJob(url, "early", fingerprint="early", limits={"max_samples": 5})
    job.run_trials(2)
    reason = " ".join(["the ranks did not agree"] * 30)
    failed = {"kind": "disagreement", "trial": job.state["trial"]["index"], "message": reason}
    for event in (failed, {"kind": "ended"}):
        job.session.post(f"{job.path}/events", json=event).raise_for_status()
    page.goto("/jobs/early")
    expect(page.locator("#badge")).to_have_text("Ended")
    expect(page.locator("#figures")).to_contain_text("so far, not confirmed")
    expect(figure(page, "Paid back after")).to_have_text("\u2013")
    expect(page.locator("#figures")).not_to_contain_text("kept")
    for place in ("#warnings", "#trials"):
        # Two lines of it, and all when it is asked for.
        text = page.locator(f"{place} .at-length summary span")
        expect(text).to_have_text(reason)
        folded = text.evaluate("node => node.clientHeight")
        text.click()
        assert text.evaluate("node => node.clientHeight") > folded


def test_the_lives_of_a_training_are_one_job(page: Page, url: str) -> None:
    for life in ("life-1", "life-2"):
        changes = {"run": "elastic", "name": "elastic", "fingerprint": "elastic"}
        DrivenJob(url, life, **changes).run_trials(2)
    page.goto("/")
    row = page.locator("#jobs tbody tr", has_text="elastic")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("life 2")
    row.get_by_role("link").click()
    lives = page.locator("#lives tbody tr")
    expect(lives).to_have_count(2)
    expect(lives.first).to_contain_text("running")
    expect(page.locator("#newer-life")).to_be_hidden()
    lives.last.get_by_role("link").click()
    expect(lives.last).to_contain_text("killed")
    page.locator("#newer-life").get_by_role("link").click()
    expect(page).to_have_url(re.compile("/jobs/life-2$"))
    expect(page.locator("#newer-life")).to_be_hidden()


def test_the_sort_and_the_knob_are_kept_in_the_address(page: Page, tuned: DrivenJob) -> None:
    trials = tuned.get("overview")["trials"]
    page.goto("/jobs/tuned")
    head = page.locator("#trials th", has_text="Speed-up")
    head.get_by_role("button").click()
    page.get_by_label("Knob that the trials are shown by").select_option("hierarchical")
    expect(page).to_have_url(re.compile(r"/jobs/tuned\?trials=-speedup&knob=hierarchical$"))
    page.reload()
    expect(head).to_have_attribute("aria-sort", "descending")
    fastest_first = sorted(trials, key=lambda trial: -trial["speedup"])
    rows = page.locator("#trials tbody tr td.index")
    expect(rows).to_have_text([str(trial["index"]) for trial in fastest_first])
    expect(page.locator("#knob")).to_have_value("hierarchical")
    # What everybody sees at first is not named, and what nobody can see changes nothing.
    page.locator("#trials th", has_text=re.compile("^Trial$")).get_by_role("button").click()
    page.locator("#knob").select_option("bucket_bytes")
    expect(page).to_have_url(re.compile("/jobs/tuned$"))
    page.goto("/jobs/tuned?trials=-nothing&knob=nothing")
    expect(rows).to_have_text([str(trial["index"]) for trial in trials])
    expect(page.locator("#knob")).to_have_value("bucket_bytes")


def test_the_first_key_leads_to_the_trials(page: Page, tuned: DrivenJob) -> None:
    del tuned
    page.goto("/jobs/tuned")
    expect(page.locator("#trials tbody tr").first).to_be_visible()
    skip = page.get_by_role("link", name="Skip to the trials")
    expect(skip).not_to_be_in_viewport()
    page.keyboard.press("Tab")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#trials-panel")).to_be_focused()
    expect(page.locator("#trials-title")).to_be_in_viewport()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Download CSV")).to_be_focused()
    # A link to the trials shows them once they are there.
    page.goto("about:blank")
    page.goto("/jobs/tuned#trials-panel")
    expect(page.locator("#trials-title")).to_be_in_viewport()


def test_what_ran_last_is_not_said_to_run(page: Page, url: str) -> None:
    job = DrivenJob(url, "gone", fingerprint="gone", limits={"max_samples": 5})
    job.run_trials(2)
    last = job.get("overview")["trials"][1]["words"]
    page.goto("/jobs/gone")
    expect(page.locator("#now-title")).to_have_text("Runs now")
    job.session.post(f"{job.path}/events", json={"kind": "ended"}).raise_for_status()
    expect(page.locator("#now-title")).to_have_text("Ran last")
    expect(page.locator("#now-phase")).to_have_text(
        "The training ended before its tuning was finished."
    )
    expect(page.locator("#now-words")).to_have_text(last)


def test_a_job_that_is_tuned_again_says_why(page: Page, url: str) -> None:
    job = DrivenJob(url, "again", fingerprint="again", limits={"max_samples": 3})
    job.finish()
    kept = job.get("overview")["job"]["configuration"]
    job.drift(2.0)
    page.goto("/jobs/again")
    expect(page.locator("#badge")).to_have_text("Tuning, round 2")
    expect(page.locator("#now-phase")).to_contain_text("The step time changed")
    overview = job.get("overview")
    # A new round begins with what was kept.
    (words,) = {t["words"] for t in overview["trials"] if t["configuration"] == kept}
    assert now(page)[0].removesuffix(" default") == words
