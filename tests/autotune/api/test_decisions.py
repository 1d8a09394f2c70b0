"""Requests are answered by threads that decide nothing."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.deciding.next_step import NextStep
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.store.trials import Move
from bagua_autotune.tuning.background import SUPERFLUOUS
from tests.autotune.api.driving import JOB, drive, settle
from tests.autotune.metrics.scraping import of, scrape
from tests.autotune.support import Ranks, registration


def test_no_request_decides(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    deciders: list[str] = []
    after = NextStep.after

    def watched(*arguments) -> object:
        deciders.append(threading.current_thread().name)
        return after(*arguments)

    monkeypatch.setattr(NextStep, "after", watched)
    state = client.put(JOB, json=registration(limits={"max_samples": 3})).get_json()
    assert state["trial"]["index"] == 0, "the baseline, which needs no decision"
    said = {"kind": "disagreement", "trial": 0, "message": "rank 3 disagreed"}
    settle(client, client.post(f"{JOB}/events", json=said).get_json())
    assert drive(client, Ranks(noise=0.001), steps=10)["state"] == "finished"
    told = {"kind": "drift", "step": 10_000, "seconds": 0.5}
    state = settle(client, client.post(f"{JOB}/events", json=told).get_json())
    assert (state["round"], state["trial"]["index"] > 0) == (1, True)
    assert set(deciders) == {"decisions"}


def test_a_decision_that_fails_is_counted(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise ArithmeticError("singular")

    client.put(JOB, json=registration())
    assert of(scrape(client), "failed_decisions_total")[()] == 0
    monkeypatch.setattr(NextStep, "after", fail)
    steps = [{"step": step, "seconds": [0.2] * 4} for step in range(1, 40)]
    body = {"trial": 0, "steps": steps}
    settle(client, client.post(f"{JOB}/observations", json=body).get_json())
    assert of(scrape(client), "failed_decisions_total")[()] == 1


def test_a_decision_that_another_replica_has_made_is_counted(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    after = NextStep.after

    def outrun(self: NextStep, round_: Round, *arguments: Any) -> Move:
        step = after(self, round_, *arguments)
        assert self._store.trials.advance(round_.job.id, step)
        return step

    client.put(JOB, json=registration())
    assert of(scrape(client), "superfluous_decisions_total")[()] == 0
    monkeypatch.setattr(NextStep, "after", outrun)
    steps = [{"step": step, "seconds": [0.2] * 4} for step in range(1, 40)]
    with caplog.at_level(logging.INFO):
        told = client.post(f"{JOB}/observations", json={"trial": 0, "steps": steps})
        state = settle(client, told.get_json())
    assert state["trial"]["index"] == 1
    assert of(scrape(client), "superfluous_decisions_total")[()] == 1
    assert caplog.text.count(SUPERFLUOUS) == 1
