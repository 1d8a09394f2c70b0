"""The page of a search with whole runs, which `bagua-autotune system` stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from bagua_autotune.store import Store
from tests.autotune.server import ServeProcess
from tests.e2e.page.reading import figure, read_points
from tests.runs.test_seen import searched

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


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
