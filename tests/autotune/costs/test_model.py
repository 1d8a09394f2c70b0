"""From profiles to predictions of step times."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Cost, CostModel, Kind, Layouts, fit_model
from bagua_autotune.costs.model import MOST_PLACES, best_partition
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_simulator import Simulator
from bagua_simulator.workloads import cases
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor
from tests.autotune.costs.profiled import MIB, profile
from tests.autotune.simulated_job import space_of
from tests.autotune.support import present

FLAT = Kind()
TENSORS = [
    Tensor(name=str(i), elements=10, bytes=10, dtype="u8", group="u8/cpu#0") for i in range(4)
]


def predicted(model: CostModel, **knobs: int | str) -> float:
    return math.exp(model.predict([Configuration(**knobs)])[0])


def test_a_step_by_hand() -> None:
    chain = Kind("leaders")
    costs = {FLAT: Cost(1.0, 0.1), Kind("off", 2): Cost(1.0, 0.1), chain: Cost(1.0, 0.1, 0.05)}
    model = CostModel(Layouts(TENSORS), [1.0, 2.0, 3.0, 4.0], costs, launch_seconds=0.0)
    # Two buckets of 20 bytes, 3 s each: full at 2 and 4.
    assert predicted(model, bucket_bytes=20) == pytest.approx(8.0)
    # On two channels the link is taken for 2.5 s each; the other half of the latency is beside.
    assert predicted(model, bucket_bytes=20, channels=2) == pytest.approx(2 + 2.5 + 2.5 + 0.5)
    # The last chain has an end of 20 bytes x 0.05 s.
    assert predicted(model, bucket_bytes=20, hierarchical="leaders") == pytest.approx(9.0)
    assert predicted(model, bucket_bytes=40) == pytest.approx(4.0 + 5.0)
    # 10 bytes at once and the rest at the end, on a free network.
    assert predicted(model, bucket_bytes=40, first_bucket_bytes=5) == pytest.approx(4.0 + 4.0)


def test_how_wrong_a_prediction_may_be_is_what_other_costs_would_change() -> None:
    costs, slower = {FLAT: Cost(1.0, 0.1)}, np.array([[Cost(1.0, 0.2).parts]])
    model = CostModel(Layouts(TENSORS), [1.0, 2.0, 3.0, 4.0], costs, 0.0, slower)
    exposed = Configuration(bucket_bytes=40)
    assert model.deviations([exposed]) == pytest.approx(np.log([[13.0 / 9.0]]))
    # Where computing hides all communication it does not matter what that costs.
    hidden = CostModel(Layouts(TENSORS), [1e3, 2e3, 3e3, 4e3], costs, 0.0, slower)
    assert hidden.deviations([exposed]) == pytest.approx(0.0, abs=0.002)
    sure = CostModel(Layouts(TENSORS), [1.0, 2.0, 3.0, 4.0], costs)
    assert sure.deviations([exposed]).shape == (0, 1)


def test_every_launch_makes_what_follows_later() -> None:
    costs = {FLAT: Cost(0.0, 0.0), Kind("leaders"): Cost(0.0, 0.0)}
    model = CostModel(Layouts(TENSORS), [1.0, 2.0, 3.0, 4.0], costs, launch_seconds=0.1)
    assert predicted(model, bucket_bytes=40) == pytest.approx(4.1)
    assert predicted(model, bucket_bytes=10) == pytest.approx(4.4)
    # A chain is of three operations.
    assert predicted(model, bucket_bytes=10, hierarchical="leaders") == pytest.approx(5.2)


def test_gradients_that_seem_to_be_ready_out_of_order_wait_for_those_before_them() -> None:
    model = CostModel(Layouts(TENSORS), [3.0, 1.0, 2.0, 4.0], {FLAT: Cost(1.0, 0.0)})
    assert model.ready_seconds.tolist() == [3.0, 3.0, 3.0, 4.0]


def test_parts_that_are_missing_come_from_earlier_jobs_or_there_is_no_model() -> None:
    layouts = Layouts(TENSORS)
    ready, costs = [0.1, 0.2, 0.3, 0.4], {FLAT: Cost(1e-3, 1e-9)}
    assert fit_model(layouts, [FLAT], []) is None
    assert fit_model(layouts, [FLAT], [], ready) is None
    assert fit_model(layouts, [FLAT], [], None, costs) is None
    assert fit_model(layouts, [FLAT], [], ready[:3], costs) is None, "times of another model"
    both = present(fit_model(layouts, [FLAT], [], ready, costs))
    assert both.ready_seconds.tolist() == ready
    own = profile(Cost(1e-3, 1e-9), sizes=[MIB] * 4)
    measured = fit_model(layouts, [FLAT], [(Configuration(bucket_bytes=1), own)], ready, costs)
    assert measured is not None
    assert measured.ready_seconds == pytest.approx(own.ready_seconds, abs=1e-3), "its own go first"


def model_of(simulator: Simulator, generator: np.random.Generator) -> CostModel:
    """Fitted to one size of each way to reduce, three noisy steps each."""
    ran = [
        Configuration({**simulator.default, "bucket_bytes": size, "hierarchical": way})
        for size, way in ((25 * MIB, "off"), (8 * MIB, "leaders"), (8 * MIB, "shards"))
    ]
    profiled = [
        (configuration, simulator.profile(configuration, step, generator, noise=0.05))
        for configuration in ran
        for step in range(3)
    ]
    kinds = [Kind.of(configuration) for configuration in ran]
    model = present(fit_model(Layouts(simulator.workload.tensors), kinds, profiled))
    return model


@pytest.mark.slow
def test_after_three_trials_it_knows_a_nearly_best_setting_of_most_networks() -> None:
    generator = np.random.default_rng(0)
    lost, default_lost = [], []
    for case in cases():
        simulator = case.simulator
        space = space_of(simulator, ("bucket_bytes", "hierarchical"))
        default = Configuration({knob: simulator.default[knob] for knob in space})
        candidates = enumerate_candidates(space, default, simulator.workload.tensors)
        seconds = np.array([simulator.step_seconds(candidate) for candidate in candidates])
        expected = model_of(simulator, generator).predict(candidates)
        lost.append(seconds[np.argmin(expected)] / seconds.min() - 1)
        default_lost.append(seconds[0] / seconds.min() - 1)
    assert np.median(default_lost) > 0.05, "there is something to know"
    assert np.median(lost) < 0.01
    assert np.quantile(lost, 0.9) < 0.1


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


@pytest.mark.parametrize("kind", [Kind(), pytest.param(Kind("leaders"), marks=pytest.mark.slow)])
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
