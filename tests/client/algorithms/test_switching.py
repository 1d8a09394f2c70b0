"""From one algorithm to another between two steps: by hand, and as a service says."""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import ByteGradAlgorithm, QAdamOptimizer
from bagua_client.testing.algorithms import Made, Training
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

MOST_STEPS = 4000
OTHERS = ["bytegrad", "powersgd", "qadam", "decentralized", "low_precision_decentralized", "async"]
TRIED = [
    Configuration(200, algorithm="decentralized"),
    Configuration(100, algorithm="bytegrad", channels=2),
    Configuration(100),
    Configuration(200, "shards", channels=2, algorithm="powersgd"),
    Configuration(300, "leaders", algorithm="low_precision_decentralized"),
    # Its replicas hold for one way to reduce: it begins anew.
    Configuration(300, algorithm="low_precision_decentralized"),
    Configuration(100, "shards", algorithm="qadam"),
    Configuration(200, algorithm="async"),
    Configuration(200, "shards", algorithm="decentralized"),
    Configuration(100),
]


def _state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Weights, and what the optimizer keeps beside them."""
    parameters = list(model.parameters())
    kept = [value for p in parameters for value in optimizer.state[p].values()]
    tensors = [*parameters, *(k for k in kept if isinstance(k, torch.Tensor) and k.dim())]
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])


def _spread(state: torch.Tensor) -> float:
    """By how much the ranks' states differ at most."""
    low, high = state.clone(), state.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return float((high - low).max())


def _with_new_optimizers() -> float:
    """How far apart ranks are that had several optimizers, one after the other."""
    model = DistributedDataParallel(small_model())
    assert model.reconfigure(Configuration(200, algorithm="decentralized"))
    optimizers: list[torch.optim.Optimizer] = []
    for phase in range(10):
        optimizers.clear()  # As a rule the next one has its memory, and so its id.
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        for step in range(2):
            model.zero_grad()
            loss_of(model, dist.get_rank(), 2 * phase + step).backward()
            optimizers[0].step()
    assert _spread(_state_of(model, optimizers[0])) > 1e-4
    assert model.reconfigure(Configuration(200))
    loss_of(model, dist.get_rank(), 20).backward()
    return _spread(_state_of(model, optimizers[0]))


def test_the_state_of_the_newest_optimizer_is_made_equal(two_ranks: RankPool) -> None:
    for apart in two_ranks.run(_with_new_optimizers):
        assert apart < 1e-6


def _tuned_model(url: str, allowed: str) -> DistributedDataParallel:
    with tuned_at(url, ALLOW=allowed):
        return DistributedDataParallel(small_model())


def _tuned(url: str, allowed: str, tells: bool) -> tuple[list[str], float]:
    """What was in force, in turn; how far apart the ranks are at the end."""
    model = _tuned_model(url, allowed)
    optimizer = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=2)
    rank, seen = dist.get_rank(), []
    for step in range(MOST_STEPS):
        if not model.is_tuning and model.configuration == TRIED[-1]:
            break
        model.zero_grad()
        loss = loss_of(model, rank, step)
        if tells:
            model.report_loss(loss)
        loss.backward()
        optimizer.step()
        seen.append(str(model.configuration))
    model(torch.ones(1, 7)).sum().backward()
    apart = _spread(_state_of(model, optimizer))
    return [words for words, _ in groupby(seen)], apart


def test_a_tuning_goes_through_all_of_them(four_ranks: RankPool) -> None:
    with ScriptedService([[configuration.to_json() for configuration in TRIED]]) as service:
        found = four_ranks.run(_tuned, service.url, ",".join(OTHERS), True)
        assert service.bodies("disagreement") == service.bodies("diverged") == []
        (registration,) = service.bodies("PUT")
        measured = {body["trial"] for body in service.bodies("observations")}
    first, *others = registration["knobs"]["algorithm"]["values"]
    assert (first, sorted(others)) == ("gradient_allreduce", sorted(OTHERS))
    assert registration["default_configuration"]["algorithm"] == "gradient_allreduce"
    assert measured == set(range(len(TRIED)))
    for words, apart in found:
        assert words[-len(TRIED) :] == [str(configuration) for configuration in TRIED]
        assert apart < 1e-6


def _counted(url: str, steps: int) -> tuple[list[str], int]:
    """A training of so many steps, in which rank 1 is slow: what was in force, in turn; and by how
    many steps this rank was ahead of another at most."""
    model = _tuned_model(url, "async")
    store, rank, seen, ahead = dist.distributed_c10d._get_default_store(), dist.get_rank(), [], 0
    key = f"bagua-test/steps of {url}"
    for step in range(steps):
        model.zero_grad()
        model.report_loss(1.0)
        loss_of(model, rank, step).backward()
        time.sleep(0.02 if rank == 1 else 0.001)
        seen.append(str(model.configuration))
        mine = store.add(f"{key}/{rank}", 1)
        ahead = max(ahead, mine - store.add(f"{key}/{1 - rank}", 0))
    dist.barrier()  # Never reached where a rank waits for a step that another will not make.
    return [words for words, _ in groupby(seen)], ahead


def test_after_apart_trials_all_ranks_have_made_as_many_steps(two_ranks: RankPool) -> None:
    apart = Configuration(200, algorithm="async")
    tried = [Configuration(200), apart, Configuration(100), apart, Configuration(300)]
    with ScriptedService([[c.to_json() for c in tried]]) as service:
        found = two_ranks.run(_counted, service.url, 250)
        assert service.bodies("disagreement") == []
        # Steps of the trials are those of both ranks, by their numbers.
        for body in service.bodies("observations"):
            assert all(len(step["seconds"]) == 2 for step in body["steps"])
    (words, ahead), (same, _) = found
    assert words == same
    assert words[-len(tried) :] == [str(configuration) for configuration in tried]
    assert ahead > 5, "the fast rank did not wait while they were apart"


def _suffers(url: str) -> tuple[list[str], int]:
    """What was in force, in turn; the loss is that of a training that bytegrad harms."""
    model = _tuned_model(url, "bytegrad")
    seen = []
    for step in range(MOST_STEPS):
        if not model.is_tuning and len(seen) > 10:
            break
        model.zero_grad()
        # Of this rank's batch; on rank 1 alone it is bad.
        is_bad = model.algorithm.name == "bytegrad" and dist.get_rank() == 1
        model.report_loss(5.0 if is_bad else 1.0)
        loss_of(model, dist.get_rank(), step).backward()
        seen.append(str(model.configuration))
    return [words for words, _ in groupby(seen)], len(seen)


def test_a_trial_that_harms_the_training_is_given_up_by_all_ranks(two_ranks: RankPool) -> None:
    usual, harmful = Configuration(200), Configuration(100, algorithm="bytegrad")
    # More steps than the harm takes to show.
    tried = [c.to_json() for c in (usual, harmful, usual)]
    with ScriptedService([tried], steps=30) as service:
        found = two_ranks.run(_suffers, service.url)
        (event,) = service.bodies("diverged")
    assert event["trial"] == 1
    assert "the loss is" in event["message"]
    assert found[0] == found[1]
    words, _ = found[0]
    place = words.index(str(harmful))
    # To the default at once, and then to what the service says.
    assert words[place + 1] not in (str(harmful), str(usual))
    assert words[-1] == str(usual)


def test_none_is_tried_where_nobody_tells_the_loss(two_ranks: RankPool) -> None:
    with ScriptedService([[TRIED[-1].to_json()]]) as service:
        two_ranks.run(_tuned, service.url, "bytegrad,bf16", False)
        (registration,) = service.bodies("PUT")
    assert "algorithm" not in registration["knobs"]
    assert registration["knobs"]["wire_precision"]["values"] == ["as_is", "bf16"]


BYTEGRAD = Made(ByteGradAlgorithm)
SMALL_BYTES = 300


def _loaded_otherwise(rank_without: int | None, options: dict[str, Any]) -> tuple[list[str], int]:
    """The names of the first bucket in the first step of a training that goes on, and the bytes of
    a bucket afterwards."""
    straight = Training(BYTEGRAD)
    for step in range(3):
        straight.step(step)
    assert straight.recut(bucket_bytes=SMALL_BYTES, first_bucket_bytes=0)
    straight.step(3)
    resumed = Training(BYTEGRAD, **options)
    if dist.get_rank() != rank_without:
        resumed.load(straight.save())
    seen: list[str] = []
    algorithm = resumed.model.algorithm
    departs = algorithm.departs

    def look(bucket: Any, wire: torch.Tensor) -> None:
        if not seen:
            seen.extend(algorithm.names[id(parameter)] for parameter in bucket.parameters())
        departs(bucket, wire)

    algorithm.departs = look  # type: ignore[method-assign]
    resumed.step(4)
    return seen, resumed.model.configuration.bucket_bytes


LISTED = ["last.weight", "last.bias", "first.weight", "first.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize(("rank_without", "is_taken"), [(None, True), (1, False), (0, False)])
def test_the_buckets_are_taken_up_if_all_ranks_have_loaded_them(
    two_ranks: RankPool, rank_without: int | None, is_taken: bool
) -> None:
    for first, size_bytes in two_ranks.run(_loaded_otherwise, rank_without, {}):
        assert (first != LISTED) is is_taken
        assert (size_bytes == SMALL_BYTES) is is_taken


def test_a_script_that_asks_for_other_buckets_gets_them_in_the_known_order(
    two_ranks: RankPool,
) -> None:
    for first, size_bytes in two_ranks.run(_loaded_otherwise, None, {"bucket_cap_mb": 1}):
        assert first[0] in ("last.bias", "last.weight")
        assert first != LISTED
        assert size_bytes == 2**20


def _of_another_model() -> bool:
    """Whether it trains, with the buckets of a new training."""
    resumed = Training(BYTEGRAD)
    state = resumed.model.algorithm.state_dict()
    state["layout"]["order"] = ["another.weight"]
    resumed.model.algorithm.load_state_dict(state)
    return resumed.step(0) == Training(BYTEGRAD).step(0)


def test_the_buckets_of_another_model_are_left(two_ranks: RankPool) -> None:
    assert two_ranks.run(_of_another_model) == [True, True]
