"""A trial that does not fit is not tried; one that turns out not to fit is left by all ranks in the
same step."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import torch.distributed as dist

import bagua_client
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.sharded.tunable_units import default_of
from bagua_client.torch_private.sharded import units_of
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.client.scripted_memory import ScriptedMemory
from tests.client.sharded.models import Kind, sharded, train
from tests.ranks import RankPool

MOST_STEPS = 3000
REST_BYTES = 10**6
KIND = Kind()


def _default() -> dict[str, Any]:
    return default_of(units_of(sharded(KIND))).to_json()


def _tune(url: str, room_bytes: int, retries_at: int) -> tuple[list[int], str, str]:
    """The kept units in each step. Rank 1 has so much room, and its allocator tries again where so
    many are kept."""
    with tuned_at(url):
        model: Any = bagua_client.tune(sharded(KIND))
        _, optimizer = train(model, KIND, {}, 1)
    tunable = tunable_of(model)
    is_own = dist.get_rank() == 1
    allowed_bytes = REST_BYTES + (room_bytes if is_own else 10**6)
    memory = ScriptedMemory(tunable, REST_BYTES, int(allowed_bytes / 0.9))
    seen = []
    while model.is_tuning and len(seen) < MOST_STEPS:
        if is_own and tunable.layout.configuration.kept_units == retries_at:
            memory.retries += 1
        train(model, KIND, {}, 1, optimizer)
        seen.append(tunable.layout.configuration.kept_units)
    train(model, KIND, {}, 2, optimizer)
    assert memory.most_bytes <= allowed_bytes
    tuning = model.tuning
    return seen, tuning.state, f"{tuning.default_peak_bytes} {tuning.peak_bytes}"


def test_what_does_not_fit_is_left(two_ranks: RankPool) -> None:
    default = two_ranks.run(_default)[0]
    tried = [{**default, "kept_units": count} for count in (0, 4, 2, 1)]
    with ScriptedService([tried]) as service:
        # A block takes 360 bytes.
        (seen, state, peaks), other = two_ranks.run(_tune, service.url, 3 * 360, 2)
        told = service.bodies("infeasible")
        reports = service.bodies("observations")
    assert other == (seen, state, peaks)
    assert state == "finished"
    # All four were never kept; two were, for as long as it took to see that they do not fit.
    assert [count for count, _ in groupby(seen)][:4] == [0, 2, 0, 1]
    assert [event["trial"] for event in told] == [1, 2]
    assert told[0]["message"].startswith("rank 1 would need")
    assert told[1]["message"].startswith("rank 1 ran out of memory until it freed")
    limit = REST_BYTES + 3 * 360
    assert told[0]["memory"] == {
        "peak_bytes": REST_BYTES + 4 * 360,
        "limit_bytes": int(0.9 * int(limit / 0.9)),
        "device_bytes": int(limit / 0.9),
        "is_predicted": True,
    }
    assert told[1]["memory"]["peak_bytes"] == REST_BYTES + 2 * 360
    assert "is_predicted" not in told[1]["memory"]
    by_trial = {report["trial"]: report["memory"]["peak_bytes"] for report in reports}
    assert by_trial == {0: REST_BYTES, 3: REST_BYTES + 360}


def _untold(url: str) -> bool:
    with tuned_at(url):
        model: Any = bagua_client.tune(sharded(KIND))
        train(model, KIND, {}, 1)
    for _ in range(MOST_STEPS):
        if not model.is_tuning:
            break
        train(model, KIND, {}, 1)
    tuning = model.tuning
    return (tuning.state, tuning.peak_bytes, tuning.device_bytes) == ("finished", None, None)


def test_on_a_processor_nothing_is_told(two_ranks: RankPool) -> None:
    default = two_ranks.run(_default)[0]
    with ScriptedService([[default, {**default, "kept_units": 4}]]) as service:
        assert two_ranks.run(_untold, service.url) == [True, True]
        assert all("memory" not in body for body in service.bodies("observations"))


def test_a_report_carries_it() -> None:
    from bagua_client.agent.report import Exchange, Report
    from bagua_client.tunable.memory import Footprint, Lack

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        exchange = Exchange(dist.group.WORLD)
        for memory in (Footprint(2**45 + 1, 3, 2**46, Lack.OVER | Lack.RETRIED), Footprint()):
            exchange.put(replace(Report(), memory=memory))
            exchange.start()
            assert exchange.conclude()[0].memory == memory
    finally:
        dist.destroy_process_group()
