"""Weights averaged in rounds that nobody waits for: what a round does, and how rounds end."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import AsyncModelAverageAlgorithm
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

Trained = tuple[nn.Module, DistributedDataParallel, torch.optim.Optimizer]


def _start(rate: float = 0.05, interval_ms: int = 1, warmup_steps: int = 0) -> Trained:
    model = small_model()
    algorithm = AsyncModelAverageAlgorithm(sync_interval_ms=interval_ms, warmup_steps=warmup_steps)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    return model, ours, torch.optim.SGD(ours.parameters(), rate)


def _step(training: Trained, step: int) -> None:
    _, ours, optimizer = training
    optimizer.zero_grad()
    loss_of(ours, dist.get_rank(), step).backward()
    optimizer.step()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([weight.detach().ravel() for weight in model.parameters()])


def _everyones(flat: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return found


def _algorithm(training: Trained) -> AsyncModelAverageAlgorithm:
    found = training[1].algorithm
    assert isinstance(found, AsyncModelAverageAlgorithm)
    return found


def _one_round() -> tuple[float, float]:
    """How far a rank is off what a round should leave it at, with its own step since; and by what
    share the sum of all weights has changed, but for these steps."""
    training = _start(interval_ms=0)
    model = training[0]
    for step in range(3):  # torch's reducer cuts its buckets, all ranks together
        _step(training, step)
    algorithm = _algorithm(training)
    algorithm.sync_interval_ms = 60_000
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(dist.get_rank() + 1.0)
    sent = _flat(model)
    before = _everyones(sent)
    _step(training, 3)
    assert algorithm.rounds == 1
    learned = _flat(model) - sent
    algorithm.abort(training[1])
    mean = torch.stack(before).mean(0)
    off = float((_flat(model) - (mean + learned)).abs().max())
    total = torch.stack(_everyones(_flat(model) - learned)).double().sum()
    wanted = torch.stack(before).double().sum()
    return off, float((total - wanted).abs() / wanted.abs())


def test_a_round_moves_each_rank_to_the_mean_and_keeps_what_it_learned_meanwhile(
    four_ranks: RankPool,
) -> None:
    for off, share in four_ranks.run(_one_round):
        assert off < 1e-5
        assert share < 1e-5


def _steps_beside_a_sleeper() -> int:
    """Steps that rank 0 makes while the others make none at all."""
    training = _start()
    for step in range(3):
        _step(training, step)
    store = dist.distributed_c10d._get_default_store()
    made = 0
    if dist.get_rank() == 0:
        for step in range(3, 33):
            _step(training, step)
            made += 1
        store.set("bagua-test/through", "1")
    else:
        store.wait(["bagua-test/through"])
    _algorithm(training).abort(training[0])
    store.delete_key("bagua-test/through") if dist.get_rank() == 0 else None
    return made


def test_no_rank_waits_for_another(three_ranks: RankPool) -> None:
    assert three_ranks.run(_steps_beside_a_sleeper)[0] == 30


def _ended() -> tuple[list[bool], int, bool]:
    training = _start()
    model, ours, _ = training
    algorithm = _algorithm(training)
    threads = threading.active_count()
    for step in range(5 + 3 * dist.get_rank()):
        _step(training, step)
    equal = []
    for average in (False, True, False):
        algorithm.abort(ours, average=average)
        algorithm.abort(model)
        first, *others = _everyones(_flat(model))
        equal.append(all(torch.equal(first, other) for other in others))
    rounds = algorithm.rounds
    _step(training, 90)
    assert algorithm.rounds == rounds
    algorithm.resume(model)
    time.sleep(0.01)
    _step(training, 91)
    resumed = algorithm.rounds == rounds + 1
    algorithm.abort(ours)
    return equal, threading.active_count() - threads, resumed


def test_rounds_end_together_wherever_each_rank_is_and_begin_again(four_ranks: RankPool) -> None:
    for equal, threads, resumed in four_ranks.run(_ended):
        assert equal == [False, True, True]
        assert threads == 0
        assert resumed


def _raising() -> tuple[bool, int, int]:
    """Forward passes fail on one rank in the middle of rounds: whether all replicas are equal after
    the last one, how many rounds there were since, and how many threads have come."""
    training = _start()
    model, ours, _ = training
    threads = threading.active_count()
    for step in range(4):
        _step(training, step)

    def fail(*_: object) -> None:
        raise ArithmeticError("no such batch")

    if dist.get_rank() == 1:
        handle = model[2].register_forward_hook(fail)  # type: ignore[index]
        for _ in range(3):
            with pytest.raises(ArithmeticError):
                _step(training, 4)
            time.sleep(0.01)
        handle.remove()
    rounds = _algorithm(training).rounds
    for step in range(5, 15):
        _step(training, step)
        time.sleep(0.005)
    rounds = _algorithm(training).rounds - rounds
    _algorithm(training).abort(ours, average=True)
    first, *others = _everyones(_flat(model))
    is_equal = all(torch.equal(first, other) for other in others)
    return is_equal, rounds, threading.active_count() - threads


def test_a_forward_pass_that_fails_on_one_rank_spoils_nothing(three_ranks: RankPool) -> None:
    for is_equal, rounds, threads in three_ranks.run(_raising):
        assert is_equal
        assert rounds > 0, "rounds go on"
        assert threads == 0


def _uneven_abort() -> tuple[float, float]:
    """The sum of all weights before and after rounds that one rank is behind in."""
    training = _start(rate=0.0, interval_ms=0)
    model = training[0]
    for step in range(3):
        _step(training, step)
    algorithm = _algorithm(training)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(dist.get_rank() + 1.0)
    before = float(torch.stack(_everyones(_flat(model))).double().sum())
    algorithm.sync_interval_ms = 1
    _step(training, 3)  # the first round begins
    dist.barrier()
    if dist.get_rank() == 0:
        for step in range(4, 40):  # ends it and begins another, which the others have not seen
            time.sleep(0.003)
            _step(training, step)
    algorithm.abort(model)
    return before, float(torch.stack(_everyones(_flat(model))).double().sum())


def test_a_rank_that_is_a_round_behind_puts_both_in_place(three_ranks: RankPool) -> None:
    for before, after in three_ranks.run(_uneven_abort):
        assert after == pytest.approx(before, rel=1e-5)


def _warmed_up() -> list[bool]:
    """After each step, whether all replicas are equal."""
    training = _start(interval_ms=0, warmup_steps=3)
    equal = []
    for step in range(5):
        _step(training, step)
        training[1].eval()
        training[1](torch.ones(1, 7))
        training[1].train()
        first, *others = _everyones(_flat(training[0]))
        equal.append(all(torch.equal(first, other) for other in others))
    return equal


def test_gradients_are_averaged_in_the_warm_up_which_evaluation_does_not_count_in(
    two_ranks: RankPool,
) -> None:
    assert two_ranks.run(_warmed_up) == [[True, True, True, False, False]] * 2


def _trained_in_eval_mode() -> torch.Tensor:
    """The weights of a training whose rank 1 makes passes of its own, which the others wait for."""
    _, model, optimizer = _start()
    model.eval()
    for step in range(8):
        if step == 0:
            assert model.reconfigure(Configuration(200))
        for is_after in (False, True):
            if dist.get_rank() == 1:
                loss_of(model, 1, 99)
            dist.barrier()
            if not is_after:
                optimizer.zero_grad()
                loss_of(model, dist.get_rank(), step).backward()
                optimizer.step()
    assert model.configuration == Configuration(200)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_async_keeps_replicas_near_in_eval_mode_beside_passes_of_one_rank(
    two_ranks: RankPool,
) -> None:
    first, second = two_ranks.run(_trained_in_eval_mode)
    apart = float((first - second).abs().max())
    assert 0 < apart < 1, "both trained, and the weights met"


def test_a_model_that_does_not_train_so_has_no_rounds() -> None:
    with pytest.raises(ValueError, match="Linear does not train with algorithm 'async'"):
        AsyncModelAverageAlgorithm().abort(nn.Linear(1, 1))
