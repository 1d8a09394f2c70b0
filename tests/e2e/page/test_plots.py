"""The plots and bars show the numbers of the API."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, Route, expect

from tests.e2e.page.reading import HIDE, Seen, as_milliseconds, milliseconds, read_points
from tests.e2e.programs.driven_job import DrivenJob

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


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
