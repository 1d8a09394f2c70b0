"""Buckets are cut anew between two steps, on all ranks or on none."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from tests.client.comparison import difference, pair
from tests.ranks import RankPool


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def _step(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()


def _own_inputs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(5, 6, generator=generator)


class _Records(logging.Handler):
    """The log of the client while in force."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        self._logger = logging.getLogger("bagua_client")
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self.lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)
        self._logger.removeHandler(self)


def _error_in_the_middle_of_a_step() -> str:
    ours = DistributedDataParallel(_model())
    last = list(ours.parameters())[-1]
    last.register_post_accumulate_grad_hook(lambda _: ours.reconfigure(Configuration(1)))
    with pytest.raises(RuntimeError) as caught:
        _step(ours, _own_inputs())
    return str(caught.value)


def test_the_middle_of_a_step_is_no_time_for_it(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_error_in_the_middle_of_a_step):
        assert "only be re-cut between two steps" in message


def _carry_over(configuration: Configuration, synchronised: bool) -> str | None:
    models = pair(_model())
    for model in models:
        if synchronised:
            _step(model, _own_inputs())
        with model.no_sync():
            _step(model, _own_inputs() + 1)
    _, ours = models
    before = [parameter.grad.clone() for parameter in ours.parameters()]
    assert ours.reconfigure(configuration)
    after = [parameter.grad for parameter in ours.parameters()]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))
    for model in models:
        _step(model, _own_inputs() + 2)
    return difference(*models)


@pytest.mark.parametrize("hierarchical", ["off", "leaders", "shards"])
@pytest.mark.parametrize("synchronised", [True, False])
def test_accumulated_gradients_are_carried_over(
    four_ranks: RankPool, hierarchical: str, synchronised: bool
) -> None:
    configuration = Configuration(200, hierarchical)
    assert four_ranks.run(_carry_over, configuration, synchronised) == [None] * 4


def _disagree(configurations: list[Configuration]) -> tuple[bool, str, list[str], str | None]:
    stock, ours = models = pair(_model())
    assert ours.reconfigure(Configuration(100, "leaders"))
    for model in models:
        _step(model, _own_inputs())
    with _Records() as lines:
        agreed = ours.reconfigure(configurations[dist.get_rank()])
        for model in models:
            for _ in range(3):
                _step(model, _own_inputs())
    errors = [line for line in lines if not line.startswith("INFO")]
    return agreed, str(ours.configuration), errors, difference(stock, ours)


@pytest.mark.parametrize(
    ("configurations", "who"),
    [
        ([Configuration(1), Configuration(1), Configuration(500), Configuration(1)], "rank 2"),
        ([Configuration(1, "leaders"), *[Configuration(1)] * 3], "rank 0"),
        ([*[Configuration(1, "shards")] * 3, Configuration(1)], "rank 3"),
        ([Configuration(1)] * 2 + [Configuration(500)] * 2, "ranks 2, 3"),
        ([Configuration(size) for size in (1, 200, 400, 800)], "ranks 1, 2, 3"),
        ([Configuration(1, channels=2), *[Configuration(1)] * 3], "rank 0"),
        ([*[Configuration(1)] * 3, Configuration(1, last_bucket_bytes=300)], "rank 3"),
    ],
)
def test_ranks_that_disagree_all_return_to_the_default_and_train_on(
    four_ranks: RankPool, configurations: list[Configuration], who: str
) -> None:
    results = four_ranks.run(_disagree, configurations)
    for rank, (agreed, configuration, errors, found) in enumerate(results):
        assert (agreed, configuration, found) == (False, str(Configuration()), None)
        if rank == 0:
            (error,) = errors
            assert error.startswith(f"ERROR {who} disagreed with the others")
            assert f"return to the default ({Configuration()})" in error
        else:
            assert errors == []


FITS, DOES_NOT_FIT = Configuration(buckets=(1, 7)), Configuration(buckets=(2, 7))


def _explicit(configurations: list[Configuration]) -> tuple[bool, Configuration, list[str]]:
    ours = DistributedDataParallel(_model())
    for _ in range(3):
        _step(ours, _own_inputs())
    with _Records() as lines:
        agreed = ours.reconfigure(configurations[dist.get_rank()])
    for _ in range(3):
        _step(ours, _own_inputs())
    return agreed, ours.configuration, [line for line in lines if not line.startswith("INFO")]


def test_explicit_buckets_that_do_not_fit_the_model_are_voted_down(two_ranks: RankPool) -> None:
    results = two_ranks.run(_explicit, [DOES_NOT_FIT] * 2)
    for rank, (agreed, configuration, lines) in enumerate(results):
        assert (agreed, configuration) == (False, Configuration())
        assert lines[0] == (
            f"WARNING rank {rank} cannot carry out 2 explicit buckets: "
            "the explicit buckets hold 9 tensors, but the model has 8"
        )
    assert "no rank can carry out the configuration 2 explicit buckets: all" in results[0][2][1]


def test_a_rank_that_alone_was_told_buckets_that_do_not_fit_votes_against_them(
    two_ranks: RankPool,
) -> None:
    results = two_ranks.run(_explicit, [FITS, DOES_NOT_FIT])
    for agreed, configuration, lines in results:
        assert (agreed, configuration) == (False, Configuration())
        assert len(lines) == 1
    assert results[0][2][0].startswith("ERROR rank 1 disagreed with the others")


def _explicit_before_the_order_is_known() -> tuple[bool, bool, list[str]]:
    ours = DistributedDataParallel(_model())
    with _Records() as lines:
        too_early = ours.reconfigure(FITS)
    for _ in range(2):
        _step(ours, _own_inputs())
    return too_early, ours.reconfigure(FITS), lines


def test_explicit_buckets_wait_for_the_order_that_they_count_in(two_ranks: RankPool) -> None:
    for too_early, later, lines in two_ranks.run(_explicit_before_the_order_is_known):
        assert (too_early, later) == (False, True)
        assert "known after the first 2 steps" in lines[0]


def _buckets_left_over(configurations: list[Configuration]) -> list[int]:
    ours = DistributedDataParallel(_model())
    left = []
    for configuration in configurations:
        _step(ours, _own_inputs())
        old = [weakref.ref(bucket.flat) for bucket in ours._reducer._buckets]
        assert ours.reconfigure(configuration)
        gc.collect()
        left.append(sum(reference() is not None for reference in old))
    return left


def test_the_memory_of_the_old_buckets_is_released(four_ranks: RankPool) -> None:
    configurations = [
        Configuration(200),
        Configuration(300, "leaders"),
        Configuration(200, "leaders"),
        Configuration(300, "shards"),
        Configuration(400),
    ]
    assert four_ranks.run(_buckets_left_over, configurations) == [[0] * 5] * 4


def _relays_of(configuration: Configuration, then: Configuration | None) -> tuple[int, list[str]]:
    """How many threads it takes, and which of them are left after it."""
    before = set(threading.enumerate())
    ours = DistributedDataParallel(_model())
    assert ours.reconfigure(configuration)
    _step(ours, _own_inputs())
    relays = set(threading.enumerate()) - before
    if then is None:
        del ours
        gc.collect()
    else:
        assert ours.reconfigure(then)
        _step(ours, _own_inputs())
        assert set(threading.enumerate()) <= before | relays
    for relay in relays:
        relay.join(timeout=10)
    return len(relays), [relay.name for relay in relays if relay.is_alive()]


@pytest.mark.parametrize(
    ("configuration", "relays"),
    [(Configuration(1, "shards"), 3), (Configuration(1, "shards", channels=2), 6)],
    ids=str,
)
@pytest.mark.parametrize("then", [None, Configuration(1, channels=4)], ids=str)
def test_the_threads_end_with_the_wrapper_or_with_the_need_for_them(
    four_ranks: RankPool, configuration: Configuration, relays: int, then: Configuration | None
) -> None:
    results = four_ranks.run(_relays_of, configuration, then)
    assert results == [(relays, [])] * 4


def _log_of_a_change() -> tuple[list[str], list[float]]:
    ours = DistributedDataParallel(_model())
    seconds = []
    with _Records() as lines:
        for configuration in (Configuration(1), Configuration(1)):
            assert ours.reconfigure(configuration)
            seconds.append(ours._reducer.recut_seconds)
    return lines, seconds


def test_a_change_is_timed_and_logged_once_by_rank_0(two_ranks: RankPool) -> None:
    (lines, seconds), (others_lines, _) = two_ranks.run(_log_of_a_change)
    (line,) = lines
    assert line.startswith("INFO cut 8 tensors into 8 buckets (bucket 1 B) in ")
    assert seconds[0] > 0
    assert seconds[1] == 0, "the same configuration again changes nothing"
    assert others_lines == []


def _set_by_hand_after_two_steps() -> list[int]:
    ours = DistributedDataParallel(_model())
    for _ in range(2):
        _step(ours, _own_inputs())
    assert ours.reconfigure(Configuration(64))
    seen = []
    for _ in range(3):
        _step(ours, _own_inputs())
        seen.append(ours.configuration.bucket_bytes)
    return seen


def test_what_is_set_by_hand_stays_when_the_order_is_agreed(two_ranks: RankPool) -> None:
    assert two_ranks.run(_set_by_hand_after_two_steps) == [[64] * 3] * 2


def _bytes_alive(references: list[weakref.ref[torch.Tensor]]) -> int:
    tensors = [reference() for reference in references]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _largest_bucket_memory(set_to_none: bool) -> tuple[int, int]:
    """Bytes in buckets before a re-cut, and the most there are while it allocates."""
    ours = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    for _ in range(3):
        _step(ours, torch.ones(2, 64))
    ours.zero_grad(set_to_none=set_to_none)
    assert ours.reconfigure(Configuration(20_000))
    flats = [weakref.ref(bucket.flat) for bucket in ours._reducer._buckets]
    before = _bytes_alive(flats)
    sizes: list[int] = []
    zeros = torch.zeros

    def watched(*args: object, **options: object) -> torch.Tensor:
        made = zeros(*args, **options)  # type: ignore[call-overload]
        if made.is_floating_point():
            flats.append(weakref.ref(made))
            sizes.append(_bytes_alive(flats))
        return made  # type: ignore[no-any-return]

    torch.zeros = watched
    try:
        assert ours.reconfigure(Configuration(40_000))
    finally:
        torch.zeros = zeros
    return before, max(sizes)


def test_a_re_cut_takes_no_second_set_of_buckets(two_ranks: RankPool) -> None:
    for before, most in two_ranks.run(_largest_bucket_memory, True):
        assert most <= before
    # Gradients that live in the old buckets are moved bucket by bucket.
    for before, most in two_ranks.run(_largest_bucket_memory, False):
        assert most <= before + 3 * 40_000
