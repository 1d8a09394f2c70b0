from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Cost, CostModel, Kind, Layouts
from bagua_autotune.costs.model import MOST_PLACES, best_partition
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor
from tests.autotune.support import present

COSTS = st.builds(Cost, st.floats(1e-6, 0.1), st.floats(1e-12, 1e-6))
KIB = 1024


def tensors(sizes: list[int], groups: int = 1) -> list[Tensor]:
    return [
        Tensor(name=str(i), elements=size, bytes=size, dtype="u8", group=f"u8/cuda#{i % groups}")
        for i, size in enumerate(sizes)
    ]


def models(most_tensors: int) -> st.SearchStrategy[tuple[list[int], list[float], Cost]]:
    """Sizes of tensors, seconds between them, and the cost of a collective."""
    sizes = st.lists(
        st.tuples(st.integers(0, 4 << 20), st.floats(0, 0.1)), min_size=1, max_size=most_tensors
    )
    return st.builds(
        lambda members, cost: ([s for s, _ in members], [g for _, g in members], cost), sizes, COSTS
    )


def compositions(count: int) -> list[tuple[int, ...]]:
    """All ways to cut a list of so many into consecutive parts."""
    found = []
    for cuts in product([False, True], repeat=count - 1):
        places = [0, *(place + 1 for place, is_cut in enumerate(cuts) if is_cut), count]
        found.append(tuple(np.diff(places).tolist()))
    return found


def step_seconds(model: CostModel, counts: tuple[int, ...], kind: Kind = Kind()) -> float:  # noqa: B008
    explicit = Configuration(bucket_bytes=1, buckets=counts, hierarchical=kind.hierarchical)
    return float(np.exp(model.predict([explicit])[0]))


@given(models(most_tensors=10))
def test_no_way_to_cut_is_better(case: tuple[list[int], list[float], Cost]) -> None:
    sizes, gaps, cost = case
    model = CostModel(Layouts(tensors(sizes)), np.cumsum(gaps).tolist(), {Kind(): cost}, 0.0)
    counts = present(model.best_partition(Kind()))
    assert sum(counts) == len(sizes)
    every = [step_seconds(model, other) for other in compositions(len(sizes))]
    assert step_seconds(model, counts) == pytest.approx(min(every), rel=1e-9)


@pytest.mark.parametrize("kind", [Kind(), Kind("leaders")])
def test_launches_and_chains_are_allowed_for(kind: Kind) -> None:
    """Nearly: their number is counted along, and not searched over."""
    rng = np.random.default_rng(0)
    lost = []
    for _ in range(40):
        sizes = rng.choice([10_000, 500_000, 2_000_000], 8).tolist()
        ready = np.cumsum(rng.choice([2e-4, 1e-3, 5e-3], 8)).tolist()
        chain = 3e-10 if kind.is_chain else 0.0
        cost = Cost(float(10 ** rng.uniform(-5, -3)), float(10 ** rng.uniform(-10, -8.5)), chain)
        model = CostModel(Layouts(tensors(sizes)), ready, {kind: cost}, launch_seconds=20e-6)
        found = present(model.best_partition(kind))
        every = [step_seconds(model, counts, kind) for counts in compositions(8)]
        lost.append(step_seconds(model, found, kind) / min(every) - 1)
    assert np.mean(lost) < 0.01
    assert max(lost) < 0.03


def test_long_lists_are_cut_nearly_as_well_though_more_coarsely() -> None:
    count = 3 * MOST_PLACES + 1
    model = CostModel(
        Layouts(tensors([40 * KIB] * count)),
        np.linspace(0.1, 0.4, count).tolist(),
        {Kind(): Cost(1e-3, 2e-9)},
        launch_seconds=0.0,
    )
    counts = present(model.best_partition(Kind()))
    assert sum(counts) == count
    assert min(counts) > 0
    by_size = [Configuration(bucket_bytes=int(KIB * 2 ** (half / 2))) for half in range(12, 36)]
    assert step_seconds(model, counts) <= np.exp(model.predict(by_size)).min() * 1.001


def test_one_list_cannot_hold_tensors_of_several_groups() -> None:
    mixed = tensors([10, 10, 10], groups=2)
    assert best_partition(mixed, np.zeros(3), Cost(1e-3, 1e-9)) is None


def test_of_equal_ways_the_rounding_of_a_cost_does_not_choose() -> None:
    rng = np.random.default_rng(0)
    sizes = tensors(rng.choice([10_000, 500_000, 2_000_000], 60).tolist())
    # The network waits for what is computed last, so many ways to cut the first tensors are equal.
    ready = np.cumsum(rng.choice([2e-4, 1e-3, 5e-3], 60))
    found = {
        best_partition(sizes, ready, Cost(1e-4 * rounded, 1e-10 * rounded))
        for rounded in 1 + 1e-15 * rng.integers(-8, 9, 20)
    }
    assert len(found) == 1


def test_equal_ways_are_cut_into_less_that_waits_for_the_last_tensor() -> None:
    # Nothing is ready before the end, and messages are free: the last one may be the smallest.
    counts = present(best_partition(tensors([10] * 4), np.full(4, 1.0), Cost(0.0, 0.0)))
    assert counts[-1] == 1
