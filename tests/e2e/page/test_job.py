"""One job's page, while it is tuned and afterwards; its plots show the numbers of the API."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from bagua_autotune.store import Store
from tests.autotune.server import ServeProcess
from tests.e2e.page.conftest import HIDE, Seen, as_milliseconds, figure, milliseconds, read_points
from tests.e2e.programs.driven_job import DrivenJob, run_bagua_job
from tests.runs.test_seen import searched

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


def test_the_trials_are_shown_over_the_chosen_knob(page: Page, tuned: DrivenJob) -> None:
    trials = tuned.get("overview")["trials"]
    page.goto("/jobs/tuned")
    knob = page.get_by_label("Knob that the trials are shown by")
    expect(knob.locator("option")).to_have_text(["bucket size", "hierarchical reduce"])
    expect(page.locator("#knob-legend")).to_contain_text("expected")
    knob.select_option("hierarchical")
    expect(page.locator("#knob-legend")).not_to_contain_text("expected")  # the curve is over sizes
    expect(page.locator("#knob-plot .canvas")).to_have_attribute(
        "aria-label", re.compile("measured trials by hierarchical reduce")
    )
    # From left to right: one value after the other, and the trials of each in their order.
    read = [int(re.match(r"trial (\d+)", text)[1]) for text in read_points(page, "#knob-plot")]
    wanted = sorted(trials, key=lambda t: (t["configuration"]["hierarchical"] != "off", t["index"]))
    assert read == [trial["index"] for trial in wanted]


def test_the_bars_of_the_knobs_are_the_shares_of_the_api(page: Page, tuned: DrivenJob) -> None:
    curve = tuned.get("curve")
    shares = [
        {"knob": "bucket_bytes", "share": 0.75, "low": 0.5, "high": 1.0},
        {"knob": "hierarchical", "share": 0.25, "low": -0.1, "high": 0.6},
    ]
    curve["importance"] = {"shares": shares, "unknown": ""}
    page.route("**/curve", lambda route: route.fulfill(json=curve))
    page.goto("/jobs/tuned")
    rows = page.locator("#importance li")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("bucket size 25 MiB \u2192 ")
    expect(rows.locator(".share-words")).to_have_text(
        ["75 % (50 to 100 %)", "25 % (\u221210 to 60 %)"]
    )
    whole = rows.first.locator(".share").bounding_box()
    for row, share in zip(rows.all(), shares, strict=True):
        for part, begin, end in (("fill", 0, "share"), ("range", "low", "high")):
            box = row.locator(f".{part}").bounding_box()
            assert box
            assert whole
            # The bar goes from the least bound to the whole gain.
            lies = [
                (edge - whole["x"]) / whole["width"] for edge in (box["x"], box["x"] + box["width"])
            ]
            wanted = [(share.get(edge, 0) + 0.1) / 1.1 for edge in (begin, end)]
            assert lies == pytest.approx(wanted, abs=0.01)


def test_a_gain_that_cannot_be_divided_has_a_reason_and_no_bars(page: Page, url: str) -> None:
    job = DrivenJob(url, "begun", fingerprint="begun")
    job.run_trials(1)
    reason = job.get("curve")["importance"]["unknown"]
    assert reason
    page.goto("/jobs/begun")
    expect(page.locator("#importance-note")).to_have_text(reason)
    expect(page.locator("#importance li")).to_have_count(0)


def test_step_time_is_shown_over_memory_where_blocks_are_recomputed(
    page: Page, tuned: DrivenJob
) -> None:
    overview = tuned.get("overview")
    counts = [*range(len(overview["trials"]))]
    overview["knobs"]["recomputed_blocks"] = {"type": "categorical", "values": counts}
    for count, trial in zip(counts, overview["trials"], strict=True):
        trial["configuration"]["recomputed_blocks"] = count
        trial["peak_bytes"] = (40 - count) * 2**30
    page.route("**/overview", lambda route: route.fulfill(json=overview))
    page.goto("/jobs/tuned")
    expect(page.locator("#knob")).to_have_value("memory")
    assert len(read_points(page, "#knob-plot")) == len(counts)
    page.locator("#knob").select_option("bucket_bytes")
    expect(page).to_have_url(re.compile("knob=bucket_bytes"))


@pytest.fixture(scope="module")
def jobs() -> dict[str, str]:
    return {}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, jobs: dict[str, str]) -> Iterator[str]:
    database = tmp_path_factory.mktemp("page") / "page.db"
    store = Store(f"sqlite:///{database}")
    jobs["ended"] = searched(store, "ended", fingerprint="cut short")
    jobs["timed"] = searched(store, "finished")
    jobs["scored"] = searched(store, "finished", has_seconds=False, fingerprint="scored")
    store.close()
    with ServeProcess(database) as service:
        yield service.url


@pytest.mark.parametrize("kind", ["timed", "scored"])
def test_a_search_that_is_over_has_its_figures_plots_and_table(
    page: Page, jobs: dict[str, str], kind: str
) -> None:
    page.goto(f"/jobs/{jobs[kind]}")
    expect(page.locator("#badge")).to_have_text("Finished")
    expect(page.locator("#headline")).to_contain_text("Tuned: ")
    expect(page.locator("#now-phase")).to_contain_text("these settings were faster than your own")
    expect(page.locator("#figures")).to_contain_text("95 % interval")
    assert (figure(page, "Step time").count() > 0) == (kind == "timed")
    assert (figure(page, "Paid back after").count() > 0) == (kind == "timed")
    for panel in ("#stock-panel", "#buckets-panel", "#ranks-panel"):
        expect(page.locator(panel)).to_be_hidden()
    expect(page.locator("#trials")).to_contain_text("the run failed: ended with exit code 1")
    expect(page.locator("#trials")).to_contain_text("NCCL_SOCKET_NTHREADS=")
    expect(page.locator("#knob option").first).to_have_text("NCCL_SOCKET_NTHREADS")
    assert len(read_points(page, "#knob-plot")) > 3
    expect(page.locator("#steps-panel")).to_be_visible(visible=kind == "timed")
    expect(page.locator("#details")).to_contain_text("whole runs")


def test_an_interrupted_search_says_so(page: Page, jobs: dict[str, str]) -> None:
    page.goto(f"/jobs/{jobs['ended']}")
    expect(page.locator("#badge")).to_have_text("Interrupted")
    expect(page.locator("#now-phase")).to_contain_text("The same command goes on with it")
    page.goto("/")
    expect(page.locator("main")).to_contain_text("Interrupted")
