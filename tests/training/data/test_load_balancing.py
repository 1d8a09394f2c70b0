"""Samples of similar cost in the same step, and equally many on all ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, DistributedSampler

from bagua_training.data import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

LENGTHS = st.lists(st.integers(1, 500), min_size=1, max_size=60)
RANKS = st.integers(1, 5)


class Lengths(Dataset[int]):
    """Samples that are their own cost; counts how often each was asked for."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.asked: Counter[int] = Counter()

    def __getitem__(self, index: int) -> int:
        self.asked[index] += 1
        return self.lengths[index]

    def __len__(self) -> int:
        return len(self.lengths)


def samplers(
    lengths: list[int], ranks: int, epoch: int = 0, **options: Any
) -> list[LoadBalancingDistributedSampler]:
    """One for each rank, as each would make it."""
    dataset = Lengths(lengths)
    found = [
        LoadBalancingDistributedSampler(
            dataset, complexities=lengths, num_replicas=ranks, rank=rank, **options
        )
        for rank in range(ranks)
    ]
    for each in found:
        each.set_epoch(epoch)
    return found


def log_normal(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return (50 * (0.7 * torch.randn(number, generator=generator)).exp()).long().add(1).tolist()


def slowest_over_mean(of_ranks: list[list[int]], lengths: list[int]) -> float:
    """Over the steps of an epoch: what the slowest ranks take, beside all ranks' mean."""
    costs = torch.tensor([[float(lengths[index]) for index in rank] for rank in of_ranks])
    return float(costs.max(0).values.sum() / costs.mean(0).sum())


@given(LENGTHS, RANKS, st.booleans(), st.booleans(), st.sampled_from([0, 0.3, 1]))
def test_ranks_get_equally_many_and_together_all(
    lengths: list[int], ranks: int, shuffle: bool, drop_last: bool, random_level: float
) -> None:
    made = samplers(lengths, ranks, shuffle=shuffle, drop_last=drop_last, random_level=random_level)
    of_ranks = [list(each) for each in made]
    assert {len(rank) for rank in of_ranks} == {len(made[0])}
    seen = Counter(index for rank in of_ranks for index in rank)
    if drop_last:
        assert set(seen.values()) <= {1}
        assert len(seen) == len(lengths) // ranks * ranks
    else:
        assert set(seen) == set(range(len(lengths)))
        times = -(-len(lengths) // ranks) * ranks / len(lengths)
        assert max(seen.values()) <= -(-times // 1)
    assert of_ranks == made[0].of_all_ranks()
    assert [list(each) for each in made] == of_ranks


@given(LENGTHS, RANKS)
def test_a_step_has_neighbours_of_the_sorted_order(lengths: list[int], ranks: int) -> None:
    """At level 0 the steps' ranges of cost do not overlap."""
    of_ranks = samplers(lengths, ranks)[0].of_all_ranks()
    steps = [[lengths[rank[step]] for rank in of_ranks] for step in range(len(of_ranks[0]))]
    ranges = sorted((min(step), max(step)) for step in steps)
    for (_, most), (least, _) in itertools.pairwise(ranges):
        assert most <= least


def test_far_more_even_than_chance() -> None:
    lengths = log_normal(4096)
    balanced = samplers(lengths, 4)[0].of_all_ranks()
    by_chance = [list(DistributedSampler(Lengths(lengths), 4, rank)) for rank in range(4)]
    assert slowest_over_mean(by_chance, lengths) > 1.5
    assert slowest_over_mean(balanced, lengths) < 1.01
    levels = [samplers(lengths, 4, random_level=level)[0].of_all_ranks() for level in (0.1, 1.0)]
    ratios = [slowest_over_mean(each, lengths) for each in levels]
    assert 1.01 < ratios[0] < ratios[1]


@pytest.mark.parametrize("shuffle", [True, False])
def test_no_rank_is_always_the_slowest(shuffle: bool) -> None:
    lengths = list(range(4000))
    of_ranks = samplers(lengths, 4, shuffle=shuffle)[0].of_all_ranks()
    slowest = Counter(max(range(4), key=lambda rank: of_ranks[rank][step]) for step in range(1000))
    assert min(slowest.values()) > 150


def test_an_epoch_differs_from_the_next_and_is_the_same_again() -> None:
    lengths = log_normal(101)
    first, second, again = (
        samplers(lengths, 2, epoch=epoch)[0].of_all_ranks() for epoch in (0, 1, 0)
    )
    assert first == again != second
    assert samplers(lengths, 2, seed=1)[0].of_all_ranks() == second
    dropped = {
        next(iter(set(range(101)) - {i for rank in each for i in rank}))
        for epoch in range(20)
        for each in [samplers(lengths, 2, epoch=epoch, drop_last=True)[0].of_all_ranks()]
    }
    assert len(dropped) > 10  # not always the largest


def _shared(lengths: list[int], fails_on: int | None) -> tuple[list[int], int] | str:
    dataset = Lengths(lengths)

    def complexity(sample: int) -> int:
        if dist.get_rank() == fails_on:
            raise OSError("no such file")
        return sample

    try:
        sampler = LoadBalancingDistributedSampler(dataset, complexity)
    except RuntimeError as error:
        return str(error)
    return list(sampler), sum(dataset.asked.values())


def test_each_cost_is_computed_once_in_the_job(two_ranks: RankPool) -> None:
    lengths = log_normal(31)
    (first, asked), (second, asked_too) = two_ranks.run(_shared, lengths, None)
    assert (asked, asked_too) == (16, 15)
    assert [first, second] == samplers(lengths, 2)[0].of_all_ranks()


def test_where_it_cannot_be_computed_all_ranks_hear_of_it(two_ranks: RankPool) -> None:
    said = "complexity_fn failed on rank 1: OSError('no such file')"
    assert two_ranks.run(_shared, [1, 2, 3], 1) == [said, said]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"complexities": [1, 2]}, r"3 samples, but complexities of shape \(2,\)"),
        ({"complexities": [1, float("nan"), 2]}, "the complexity of sample 1 is nan"),
        ({"complexities": [1, 2, 3], "random_level": 1.1}, "random_level must be from 0 to 1"),
        ({"complexities": [1, 2, 3], "rank": 2}, "Invalid rank 2"),
        ({}, "one of the two"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadBalancingDistributedSampler(
            Lengths([1, 2, 3]), **{"num_replicas": 2, "rank": 0, **arguments}
        )


class ByLabel(list[float]):
    """Indexed by labels and iterated in order, as is a column of a sorted table of pandas."""

    def __getitem__(self, label: Any) -> Any:
        return super().__getitem__(len(self) - 1 - label)


@pytest.mark.parametrize(
    "kind", [numpy.array, torch.tensor, iter, ByLabel, lambda each: [*map(torch.tensor, each)]]
)
def test_complexities_may_be_of_any_kind(kind: Any) -> None:
    values = [3.0, -1.0, 0.0, 1e9]
    sampler = LoadBalancingDistributedSampler(
        Lengths([0] * 4), complexities=kind(values), num_replicas=1, rank=0, shuffle=False
    )
    assert sampler.complexities.tolist() == values
    assert list(sampler) == [1, 2, 0, 3]


@pytest.mark.parametrize("drop_last", [False, True])
def test_without_samples_no_rank_has_any(drop_last: bool) -> None:
    assert [list(each) for each in samplers([], 3, drop_last=drop_last)] == [[]] * 3


def by_tokens(most: int, lengths: list[int]) -> Any:
    """Batches of consecutive samples, each with at most so many tokens."""

    def batches(indices: list[int]) -> list[list[int]]:
        found: list[list[int]] = []
        for index in indices:
            if not found or sum(lengths[i] for i in found[-1]) + lengths[index] > most:
                found.append([])
            found[-1].append(index)
        return found

    return batches


@given(LENGTHS, RANKS, st.booleans(), st.integers(1, 2000))
def test_all_ranks_have_equally_many_batches(
    lengths: list[int], ranks: int, drop_last: bool, most: int
) -> None:
    made = [
        LoadBalancingDistributedBatchSampler(each, by_tokens(most, lengths), drop_last)
        for each in samplers(lengths, ranks)
    ]
    batches = [list(each) for each in made]
    assert {len(each) for each in batches} == {len(each) for each in made} == {len(made[0])}
    own = [by_tokens(most, lengths)(rank) for rank in made[0].sampler.of_all_ranks()]
    wanted = min if drop_last else max
    assert len(made[0]) == wanted(len(each) for each in own)
    for found, expected in zip(batches, own, strict=True):
        assert found == [expected[n % len(expected)] for n in range(len(found))]


def test_batches_without_samples_are_left_out() -> None:
    """A rank that met one would fail while it collates, and the others would wait for it."""

    def with_empty_ones(indices: list[int]) -> Iterator[list[int]]:
        for index in indices:
            yield [index]
            yield []

    sampler = samplers([1, 2, 3, 4], 2)[0]
    batches = LoadBalancingDistributedBatchSampler(sampler, with_empty_ones)
    assert list(batches) == [[index] for index in sampler]


def test_a_rank_without_batches_is_an_error_unless_all_are_dropped() -> None:
    def of_large_ones(indices: list[int]) -> list[list[int]]:
        return [[index] for index in indices if index == 3]

    options = [
        LoadBalancingDistributedBatchSampler(each, of_large_ones, drop_last)
        for drop_last in (False, True)
        for each in samplers([1, 1, 2, 2], 2, shuffle=False)[:1]
    ]
    with pytest.raises(ValueError, match=r"no batch for rank \d, and 1 for others"):
        list(options[0])
    assert list(options[1]) == []


def test_a_new_epoch_has_new_batches_whoever_sets_it() -> None:
    lengths = log_normal(40)
    sampler = samplers(lengths, 2)[0]
    batches = LoadBalancingDistributedBatchSampler(sampler, by_tokens(100, lengths))
    first = list(batches)
    assert isinstance(sampler, DistributedSampler)  # Or Lightning would put another in its place,
    sampler.set_epoch(1)  # and not do this.
    assert list(batches) != first
    batches.set_epoch(0)
    assert list(batches) == first


def test_only_with_a_sampler_that_keeps_all() -> None:
    for sampler in (samplers([1, 2], 1, drop_last=True)[0], None):
        with pytest.raises(ValueError, match="without drop_last"):
            LoadBalancingDistributedBatchSampler(sampler, lambda indices: [indices])  # type: ignore[arg-type]
