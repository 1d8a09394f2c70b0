"""What tuning saved, from the ranks' reports to the figures that are scraped."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.autotune.api.driving import JOB, drive, of, scrape, settle
from tests.autotune.support import Ranks, peaked, registration

pytestmark = pytest.mark.slow

RANKS = 4
STEP_SECONDS = 0.2


def flat(configuration: object) -> float:
    return STEP_SECONDS


def tuned(client: FlaskClient, **ranks: Any) -> tuple[dict[str, Any], int]:
    """A tuned job's state, and the last step that its ranks told of."""
    client.put(JOB, json=registration())
    state = drive(client, Ranks(noise=0.001, **ranks), steps=10)
    found = client.get(f"{JOB}/observations").get_json()["observations"]
    return state, max(observation["step"] for observation in found)


def tell(client: FlaskClient, step: int, seconds: float = STEP_SECONDS) -> None:
    answer = client.post(f"{JOB}/progress", json={"step": step, "seconds": seconds})
    assert answer.status_code == 200, answer.text


def saved(client: FlaskClient) -> float:
    return of(scrape(client), "job_saved_rank_seconds")["digits",]


def test_a_confirmed_gain_is_counted_for_the_steps_that_were_told_of(client: FlaskClient) -> None:
    state, last = tuned(client)
    result = state["result"]
    cost = result["cost_seconds"] * RANKS
    assert result["kept"] == "winner"
    assert saved(client) == pytest.approx(-cost), "so far it has only cost"
    tell(client, last + 1000)
    each = STEP_SECONDS * (result["speedup"] - 1) * RANKS
    assert saved(client) == pytest.approx(1000 * each - cost)
    tell(client, last + 1500, 2 * STEP_SECONDS)
    gain = 1000 * each + 500 * 2 * each
    assert saved(client) == pytest.approx(gain - cost)
    found = scrape(client)
    assert of(found, "saved_rank_seconds_total")[()] == pytest.approx(gain)
    assert of(found, "search_cost_rank_seconds_total")[()] == pytest.approx(cost)
    (listed,) = client.get("/api/v2/jobs").get_json()["jobs"]
    assert listed["saved_rank_seconds"] == pytest.approx(gain - cost)


def test_what_is_sent_again_or_late_is_counted_once(client: FlaskClient) -> None:
    _, last = tuned(client)
    tell(client, last + 1000)
    before = scrape(client)
    for step in (last + 1000, last + 10, 0):
        tell(client, step)
    assert saved(client) == of(before, "job_saved_rank_seconds")["digits",]
    assert of(scrape(client), "saved_rank_seconds_total") == of(before, "saved_rank_seconds_total")


def test_where_the_default_was_kept_there_is_only_the_cost(client: FlaskClient) -> None:
    state, last = tuned(client, step_seconds=flat)
    assert state["result"]["kept"] == "baseline"
    tell(client, last + 1000)
    assert saved(client) == pytest.approx(-state["result"]["cost_seconds"] * RANKS)
    assert of(scrape(client), "saved_rank_seconds_total") == {(): 0}


def test_steps_of_a_search_save_nothing(client: FlaskClient) -> None:
    client.put(JOB, json=registration())
    assert not of(scrape(client), "job_saved_rank_seconds")
    tell(client, 10**6)
    assert of(scrape(client), "saved_rank_seconds_total") == {(): 0}


def test_a_later_round_adds_to_what_was_saved_before(client: FlaskClient) -> None:
    state, last = tuned(client)
    first = state["result"]
    tell(client, last + 1000)
    drift = {"kind": "drift", "step": last + 1000, "seconds": 0.6}
    settle(client, client.post(f"{JOB}/events", json=drift).get_json())
    slower = Ranks(noise=0.001, step_seconds=lambda configuration: 3 * peaked(configuration))
    slower.step = last + 1000
    second = drive(client, slower, steps=10)["result"]
    gain = 1000 * STEP_SECONDS * (first["speedup"] - 1)
    cost = first["cost_seconds"] + second["cost_seconds"]
    assert saved(client) == pytest.approx((gain - cost) * RANKS)


def test_a_winner_that_was_given_up_saves_nothing_more(client: FlaskClient) -> None:
    _, last = tuned(client)
    client.post(f"{JOB}/events", json={"kind": "diverged", "message": "its loss is not finite"})
    before = saved(client)
    tell(client, last + 1000)
    assert saved(client) == before


@pytest.mark.parametrize(
    "told", [{}, {"step": 1}, {"step": -1, "seconds": 1.0}, {"step": 1, "seconds": 0.0}]
)
def test_wrong_progress_is_refused(client: FlaskClient, told: dict[str, float]) -> None:
    client.put(JOB, json=registration())
    assert client.post(f"{JOB}/progress", json=told).status_code == 422
