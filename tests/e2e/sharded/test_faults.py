"""Whatever happens to a rank while a sharded model is changed, the training loses
no step and has the numbers of an untouched one; where a rank is killed, the others end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.client.agent.scripted_service import ScriptedService
from tests.e2e.conftest import LIMITS
from tests.e2e.programs.sharded_training import CHANGES, DEFAULT, Report, Trouble, train
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

MOST_STEPS = 20000
# What a rank says whose neighbour is gone: torch.distributed's own words.
TORCHS = ("RuntimeError", "DistBackendError", "DistNetworkError")


@pytest.fixture
def ranks() -> Iterator[Callable[[str], RankPool]]:
    """Makes two ranks that are tuned by the service at an address."""
    pools = []

    def make(url: str) -> RankPool:
        variables = {**LIMITS, "BAGUA_AUTOTUNE_ALLOW": "bf16", "BAGUA_AUTOTUNE_URL": url}
        pools.append(RankPool([2], collective_timeout_seconds=30, variables=variables))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def _check(reports: list[Report]) -> None:
    """All ranks made the same steps, with the numbers of the twin that was not touched."""
    one, other = reports
    assert (one.differing, other.differing) == ("", "")
    assert (one.steps, one.in_force, one.state) == (other.steps, other.in_force, other.state)


def _scripted(changes: tuple[str, ...] = tuple(CHANGES)) -> ScriptedService:
    """Follows a script, so that each of these changes is made."""
    tried = [DEFAULT, *(CHANGES[name] for name in changes), DEFAULT]
    return ScriptedService([[each.to_json() for each in tried]])


def test_each_kind_of_change_is_made_and_a_rank_may_stand_still_in_it_and_under_it(
    ranks: Callable[[str], RankPool],
) -> None:
    with _scripted() as service:
        reports = ranks(service.url).run(
            train, MOST_STEPS, Trouble("stop", "put scatter", seconds=1), timeout_seconds=200
        )
    _check(reports)
    assert reports[0].state == "finished"
    assert {str(each) for each in CHANGES.values()} <= set(reports[0].in_force)
    assert service.bodies("disagreement") == []


@pytest.mark.parametrize(
    ("where", "failing"),
    [
        # Of more than a few the ranks would say that they disagree too often.
        ("put", ("keep", "merge", "stripe")),
        ("put", ("own-scatter-group", "precision", "eight-bits", "recompute")),
        ("groups", ("stripe", "own-scatter-group")),
    ],
)
def test_a_rank_that_cannot_make_a_change_takes_all_back(
    ranks: Callable[[str], RankPool], where: str, failing: tuple[str, ...]
) -> None:
    trouble = Trouble("raise", where, failing)
    with _scripted(failing) as service:
        reports = ranks(service.url).run(train, MOST_STEPS, trouble, timeout_seconds=200)
        told = service.bodies("disagreement")
    _check(reports)
    assert reports[0].state == "finished"
    assert len(told) == len(failing)
    assert reports[0].in_force == [str(DEFAULT)]
    for report in reports:
        assert any("no room" in line for line in report.logged)


@pytest.mark.parametrize(
    ("change", "where", "victim"),
    [
        ("own-scatter-group", "put", 0),
        ("stripe", "groups", 1),
        ("merge", "scatter", 0),
    ],
)
def test_when_a_rank_is_killed_the_other_ends(
    ranks: Callable[[str], RankPool], change: str, where: str, victim: int
) -> None:
    trouble = Trouble("kill", where, (change,), victim)
    with _scripted((change,)) as service:
        outcomes = ranks(service.url).outcomes(train, MOST_STEPS, trouble, timeout_seconds=90)
    assert outcomes[victim].error == "ended with exit code -9"
    error = outcomes[1 - victim].error or ""
    assert any(name in error for name in TORCHS), error
    assert "gloo" in error.lower(), error
