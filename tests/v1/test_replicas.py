"""A pair of requests is two statements, and replicas that remember lose nothing of each other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.support import counting, stored_jobs
from tests.v1.worker import TENSORS

pytestmark = pytest.mark.slow

RANKS = 4
WIRE_TENSORS = [{"name": t.name, "num_elements": t.elements, "dtype": t.dtype} for t in TENSORS]


class Rank:
    """A worker that sends each request to another replica."""

    def __init__(self, replicas: list[FlaskClient], rank: int) -> None:
        self.replicas, self.rank, self.chance = replicas, rank, random.Random(rank)
        self.running: dict[str, Any] = {}
        self.speed = 10.0 + rank

    def post(self, what: str, **body: Any) -> Any:
        client = self.chance.choice(self.replicas)
        answer = client.post(f"/api/v1/{what}", json={"model_name": "net", **body})
        assert answer.status_code == 200, answer.text
        return answer.get_json()

    def register(self) -> None:
        self.post("register_tensors", tensor_list=WIRE_TENSORS)

    def report(self, iteration: int) -> None:
        told = {"train_iter": iteration, "hyperparameters": self.running, "speed": self.speed}
        self.post("report_metrics", rank=self.rank, **told)

    def ask(self, iteration: int) -> dict[str, Any]:
        answer = self.post("ask_hyperparameters", rank=self.rank, train_iter=iteration)
        self.running = answer["recommended_hyperparameters"]
        return self.running


def clients(url: str, count: int, **settings: Any) -> Iterator[list[FlaskClient]]:
    stores = [Store(url) for _ in range(count)]
    chosen = Settings.load({}, database=url, world_size=RANKS, **settings)
    yield [create_app(chosen, store).test_client() for store in stores]
    for store in stores:
        store.close()


@pytest.fixture
def replicas(empty_url: str) -> Iterator[list[FlaskClient]]:
    yield from clients(empty_url, 2, warmup_seconds=0.0, trial_seconds=0.001)


def test_ranks_that_speak_to_two_replicas_at_once_are_told_the_same(
    replicas: list[FlaskClient], empty_url: str
) -> None:
    # A client of Flask's is of one thread.
    ranks = [Rank([r.application.test_client() for r in replicas], rank) for rank in range(RANKS)]
    ranks[0].register()
    sizes = set()
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(lambda rank: rank.ask(0), ranks))
        for iteration in range(100, 2600, 100):
            list(threads.map(Rank.report, ranks, [iteration] * RANKS))
            told = list(threads.map(Rank.ask, ranks, [iteration] * RANKS))
            assert told == [told[0]] * RANKS
            sizes.add(told[0]["bucket_size"])
    assert len(sizes) > 1
    store = Store(empty_url)
    (job,) = stored_jobs(store)
    last = {found.step: found.values for _, found in store.observations.of(job.id)}
    whole = [values for values in last.values() if len(values) == RANKS and None not in values]
    assert len(whole) == len(last), "a report was acknowledged and is not stored"
    store.close()


def test_a_pair_is_two_statements_while_nothing_is_tuned(store: Store) -> None:
    chosen = Settings.load({}, database="sqlite://", world_size=1, warmup_seconds=86_400)
    rank = Rank([create_app(chosen, store).test_client()], 0)
    rank.register()
    rank.ask(0)
    for iteration in (100, 200):
        rank.speed *= 2  # it has not settled
        with counting() as statements:
            rank.report(iteration)
            rank.ask(iteration)
    assert [statement.split()[:2] for statement in statements] == [["UPDATE", "families"]] * 2
