"""The page in a real browser, against a real service, while jobs are tuned."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

from tests.autotune.server import ServeProcess
from tests.browser import CHROMIUM, launched
from tests.e2e.driven_job import DrivenJob, run_bagua_job

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM}"),
]
HOSTILE = "<img src=x onerror=alert(1)>"
TIMES = re.compile(r"\d\.\d\dx")
TOKEN = "sésame, open"
QUICK_LIMITS = {
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.01",
}
HIDE = """(hidden) => {
    Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
# Of every visible text the contrast with what is behind it (WCAG 2.2, 1.4.3), and what is wider
# than the screen; both as what a reader would point at.
AUDIT = (Path(__file__).parent / "page_audit.js").read_text()


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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
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


def test_the_page_follows_a_tuning_without_being_loaded_again(page: Page, url: str) -> None:
    job = DrivenJob(url, "live", name="live", fingerprint="live", limits={"max_samples": 5})
    page.goto("/jobs/live")
    expect(figure(page, "Speed-up")).to_have_text("\u2013")
    page.evaluate("window.isSame = true")
    job.run_trials(3)
    expect(figure(page, "Tried")).to_have_text("3 trials")
    before = page.locator("#headline").inner_text()
    job.finish()
    expect(page.locator("#badge")).to_have_text("Finished")
    result = job.get("overview")["job"]["result"]
    expect(figure(page, "Speed-up")).to_have_text(f"{result['speedup']:.2f}x")
    expect(page.locator("#figures")).to_contain_text(f"{result['low']:.2f} to {result['high']:.2f}")
    expect(page.locator("#headline")).to_have_text(job.get("overview")["job"]["headline"])
    assert page.locator("#headline").inner_text() != before
    assert page.evaluate("window.isSame")


def test_the_plots_show_the_numbers_of_the_api(page: Page, tuned: DrivenJob) -> None:
    overview = tuned.get("overview")
    page.goto("/jobs/tuned")
    by_size = read_points(page, "#knob-plot")
    assert len(by_size) == len(overview["trials"])
    for text in by_size:
        trial = overview["trials"][int(re.match(r"trial (\d+)", text)[1])]
        wanted = [as_milliseconds(trial[key]) for key in ("seconds", "low", "high")]
        assert milliseconds(text.splitlines()[1]) == wanted
        assert trial["words"] in text
    steps = read_points(page, "#steps-plot")
    points = overview["steps"]["points"]
    assert [milliseconds(text)[0] for text in steps] == [
        as_milliseconds(point["seconds"]) for point in points
    ]
    assert len(read_points(page, "#best-plot")) == len(overview["best"])
    ranks = read_points(page, "#ranks-plot")
    assert [milliseconds(text) for text in ranks] == [
        [as_milliseconds(rank["seconds"]), as_milliseconds(rank["compute_seconds"])]
        for rank in overview["ranks"]
    ]
    gain = tuned.get("curve")["expected_gain"] * 100
    words = f"{round(gain, 1):g} %" if gain >= 0.05 else "less than 0.1 %"
    expect(page.locator("#knob-note")).to_contain_text(f"gain {words} of the step time")
    for plot in page.locator(".canvas").all():
        assert " ms" in (plot.get_attribute("aria-label") or "")


def test_a_curve_of_fewer_trials_is_asked_for_again(page: Page, tuned: DrivenJob) -> None:
    """The service tells what it has while it works out another one."""
    older = {**tuned.get("curve"), "trials": 1, "curves": []}
    answers: list[Route] = []

    def answer(route: Route) -> None:
        answers.append(route)
        if len(answers) < 3:
            route.fulfill(json=older)
        else:
            route.continue_()

    page.route("**/curve", answer)
    with page.expect_response("**/curve"):
        page.goto("/jobs/tuned")
    for _ in range(2):
        with page.expect_response("**/curve"):
            for hidden in (True, False):  # asks at once
                page.evaluate(HIDE, hidden)
    expect(page.locator("#knob-legend")).to_contain_text("expected")
    expect(page.locator("#knob-trouble")).to_be_empty()
    with page.expect_response("**/overview"):
        for hidden in (True, False):
            page.evaluate(HIDE, hidden)
    assert len(answers) == 3


def test_what_the_search_cannot_say_now_keeps_nothing_else(
    page: Page, tuned: DrivenJob, seen: Seen
) -> None:
    del tuned
    held: list[Route] = []
    page.route("**/curve", lambda route: held.append(route))
    page.clock.install()
    page.goto("/jobs/tuned")
    for shown in ("#steps-plot canvas", "#knob-plot canvas", "#best-plot canvas", ".bucket-bar"):
        expect(page.locator(shown).first).to_be_visible()
    expect(page.locator("#knob-legend")).not_to_contain_text("expected")
    for route in held:
        route.abort()
    expect(page.locator("#knob-trouble")).to_contain_text("asked again")
    expect(page.locator("#trouble")).to_be_hidden()
    page.unroute("**/curve")
    page.clock.fast_forward(15_000)
    for hidden in (True, False):  # asks at once
        page.evaluate(HIDE, hidden)
    expect(page.locator("#knob-legend")).to_contain_text("expected")
    expect(page.locator("#knob-trouble")).to_be_empty()
    assert all("ERR_FAILED" in complaint for complaint in seen.complaints)
    seen.complaints.clear()


def test_buckets_are_to_scale(page: Page, tuned: DrivenJob) -> None:
    buckets = tuned.get("buckets")
    page.goto("/jobs/tuned")
    bars = page.locator(".bucket-bar")
    expect(bars).to_have_count(2)
    for bar, layout in zip(bars.all(), buckets["layouts"], strict=True):
        widths = bar.locator(".bucket").evaluate_all("all => all.map((one) => one.clientWidth)")
        assert len(widths) == len(layout["buckets"])
        for width, bucket in zip(widths, layout["buckets"], strict=True):
            assert width / sum(widths) == pytest.approx(bucket["bytes"] / buckets["bytes"], rel=0.1)
        bar.focus()
        page.keyboard.press("End")
        expect(bar.locator("..").locator(".bucket-status")).to_contain_text(
            layout["buckets"][-1]["last"]
        )


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
    page.locator("#trials th", has_text="Configuration").get_by_role("button").click()
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


def test_the_list_is_sorted_and_filtered(page: Page, url: str, tuned: DrivenJob) -> None:
    DrivenJob(url, "another", name="bert", fingerprint="another")
    page.goto("/")
    names = page.locator("#jobs .job a")
    expect(names.filter(has_text="bert")).to_be_visible()
    page.locator("#jobs th", has_text="Job").get_by_role("button").click()
    shown = names.all_inner_texts()
    assert shown == sorted(shown, key=str.lower)
    page.get_by_label("Filter the jobs shown by name").fill("RESNET")
    expect(names).to_have_text(["resnet50"])
    overview = tuned.get("overview")
    speedup = overview["job"]["figures"]["speedup"]
    expect(page.locator("#jobs .speedup b")).to_have_text(f"{speedup:.2f}x")
    before, best = (overview["job"]["figures"][f"{n}_seconds"] for n in ("baseline", "incumbent"))
    expect(page.locator("#jobs td.step")).to_have_text(
        f"{as_milliseconds(before)} \u2192 {as_milliseconds(best)} ms"
    )
    page.get_by_label("Filter the jobs shown by state").select_option("tuning")
    expect(page.get_by_text("None of the jobs shown has that name and state.")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_shows_all_of_it_legibly(page: Page, tuned: DrivenJob, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 375, "height": 800})
    for path in ("/", "/jobs/tuned"):
        page.goto(path)
        expect(page.locator("#content")).to_be_visible()
        expect(page.locator("#jobs tbody tr, #trials tbody tr").first).to_be_visible()
        assert page.evaluate(AUDIT) == []
    heads = [
        page.locator(f"#trials th.{kind} button").bounding_box() for kind in ("step", "speedup")
    ]
    right = [round(box["x"] + box["width"]) for box in heads if box]
    assert right[0] == right[1]


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


def test_silence_is_by_the_clock_of_the_service_and_announced_once(page: Page, url: str) -> None:
    DrivenJob(url, "silent", fingerprint="silent")
    page.clock.install(time=time.time() + 10_000)
    page.goto("/jobs/silent")
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#warnings")).to_be_empty()
    page.clock.fast_forward(72_000)  # 2 s more: the service tells whole seconds
    expect(page.locator("#warnings")).to_contain_text("not been heard of for 1 min 10 s")
    announced = page.locator("#announced").inner_text()
    assert "1 min 10 s" in announced
    page.clock.fast_forward(20_000)
    expect(page.locator("#warnings")).to_contain_text("1 min 30 s")
    assert page.locator("#announced").inner_text() == announced


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


def test_ranks_chosen_from_many_stand_side_by_side(page: Page, tuned: DrivenJob) -> None:
    overview = tuned.get("overview")
    ranks = [
        {"rank": rank, "seconds": 0.2, "compute_seconds": 0.1 + 0.001 * (7 * rank // 32 % 16)}
        for rank in range(0, 512, 32)
    ]
    job = {**overview["job"], "world_size": 512}
    job["figures"] = {**job["figures"], "slow_rank": 32, "slowest_rank": 32}
    job["figures"] |= {"rank_spread_ratio": 0.2, "slowest_share": 0.75}
    changed = {**overview, "job": job, "ranks": ranks}
    page.route("**/overview", lambda route: route.fulfill(json=changed))
    page.goto("/jobs/tuned")
    expect(page.locator("#warnings")).to_contain_text("Rank 32 is slow")
    expect(page.locator("#ranks-note")).to_contain_text("ordered by computing time")
    read = [milliseconds(text)[1] for text in read_points(page, "#ranks-plot")]
    assert read == [as_milliseconds(0.1 + 0.001 * n) for n in range(16)]
    ring = page.locator("#ranks-plot .ring").bounding_box()
    over = page.locator("#ranks-plot .u-over").bounding_box()
    assert ring
    assert over
    # The last of 16 is where the last of 16 bars is, not where rank 480 of 512 would be.
    assert ring["x"] + ring["width"] / 2 - over["x"] == pytest.approx(
        over["width"] * 15.6 / 16.2, abs=2
    )


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
    page.clock.run_for(59_000)
    assert seen.polls() == len(seen.complaints) == 1
    assert "404" in seen.complaints.pop()
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


def test_the_lives_of_a_training_are_one_job(page: Page, url: str) -> None:
    for life in ("life-1", "life-2"):
        changes = {"run": "elastic", "name": "elastic", "fingerprint": "elastic"}
        DrivenJob(url, life, **changes).run_trials(2)
    page.goto("/")
    (row,) = page.locator("#jobs tbody tr", has_text="elastic").all()
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
