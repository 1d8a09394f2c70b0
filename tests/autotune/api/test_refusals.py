"""Requests with a wrong token are told of: few lines, with addresses and counts, and a metric."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from flask.testing import FlaskClient

from bagua_autotune.api.admission import MOST_ADDRESSES, MOST_NAMED, Refusals
from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.metrics.scraping import of, scrape

TOLD = "refused requests without a token that this service takes: "


@pytest.fixture
def guarded() -> Iterator[FlaskClient]:
    store = Store("sqlite://")
    settings = Settings.load({"BAGUA_AUTOTUNE_TOKEN": "right"}, database="sqlite://")
    yield create_app(settings, store).test_client()
    store.close()


def test_many_refusals_are_one_line_and_a_metric(
    guarded: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    assert of(scrape(guarded), "refused_tokens_total") == {(): 0}, "so that the first one shows"
    for _ in range(100):
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert guarded.get("/api/v2/jobs", headers=headers).status_code == 401
    allowed = {"Authorization": "Bearer right"}
    assert guarded.get("/api/v2/jobs", headers=allowed).status_code == 200
    lines = [record.message for record in caplog.records if "token" in record.message]
    assert lines == [TOLD + "1 from 127.0.0.1"]
    assert of(scrape(guarded), "refused_tokens_total") == {(): 200}


def test_after_a_while_a_line_says_how_many_there_were_and_from_where(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: waiting.append(timer))
    caplog.set_level(logging.WARNING)
    refusals = Refusals()

    def lines_after_a_while() -> list[str]:
        caplog.clear()
        (timer,) = waiting
        waiting.clear()
        timer.function()
        return [record.message for record in caplog.records]

    refusals.count("10.0.0.1")
    for _ in range(6400):
        refusals.count("10.0.0.1")
    refusals.count("10.0.0.2")
    assert lines_after_a_while() == [TOLD + "6400 from 10.0.0.1, 1 from 10.0.0.2"]
    for number in range(3 * MOST_ADDRESSES):
        refusals.count(f"10.0.{number // 256}.{number % 256}")
    (line,) = lines_after_a_while()
    assert f"{2 * MOST_ADDRESSES} from further addresses" in line
    assert line.endswith(f"{MOST_ADDRESSES - MOST_NAMED + 1} from others")
    assert lines_after_a_while() == []
    assert waiting == [], "no timer runs while nothing is refused"
    refusals.count("10.0.0.1")
    assert caplog.records[-1].message == TOLD + "1 from 10.0.0.1"
