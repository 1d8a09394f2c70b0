"""What a job that may choose its algorithm tries, and what of it says the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pydantic import ValidationError

from bagua_autotune.costs import Cost, CostModel, Kind, Layouts, fit_model, kinds_of
from bagua_autotune.model.job import JobSpec
from bagua_autotune.model.knobs import Categorical, LogInteger, Space
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_wire.configuration import Configuration
from bagua_wire.words import describe
from tests.autotune.costs.profiled import SIZES, profile
from tests.autotune.support import MIB, make_spec

NAMES = (
    "gradient_allreduce",
    "bytegrad",
    "powersgd",
    "decentralized",
    "low_precision_decentralized",
    "async",
    "my_own",
)
SPACE: Space = {
    "bucket_bytes": LogInteger(low=MIB, high=64 * MIB),
    "hierarchical": Categorical(values=("off", "leaders", "shards")),
    "channels": Categorical(values=(1, 2, 4)),
    "first_bucket_bytes": Categorical(values=(0, MIB)),
    "wire_precision": Categorical(values=("as_is", "bf16")),
    "algorithm": Categorical(values=NAMES),
}
BASELINE = Configuration(
    bucket_bytes=25 * MIB, hierarchical="off", channels=1, first_bucket_bytes=0,
    wire_precision="as_is", algorithm="gradient_allreduce",
)  # fmt: skip
SPEC = make_spec()


def candidates_of(algorithm: str, baseline: Configuration = BASELINE) -> list[Configuration]:
    every = enumerate_candidates(SPACE, baseline, SPEC.tensors)
    assert every[0] == baseline
    assert len(set(every)) == len(every)
    return [candidate for candidate in every if candidate["algorithm"] == algorithm]


def test_each_algorithm_is_tried_with_the_knobs_that_it_has() -> None:
    usual = candidates_of("gradient_allreduce")
    assert {c["wire_precision"] for c in usual} == {"as_is", "bf16"}
    for name in NAMES[1:]:
        found = candidates_of(name)
        assert found, name
        # Eight bits, and weights, travel as they are.
        assert {c["wire_precision"] for c in found} == {"as_is"}
    bytes_ = candidates_of("bytegrad")
    assert {c["hierarchical"] for c in bytes_} == {"off", "leaders", "shards"}
    assert len({c["bucket_bytes"] for c in bytes_}) > 3
    for name in ("powersgd", "low_precision_decentralized"):
        assert {c["hierarchical"] for c in candidates_of(name)} == {"off", "leaders"}
    assert len({c["bucket_bytes"] for c in candidates_of("powersgd")}) > 3


def test_what_makes_no_difference_is_tried_once() -> None:
    # All weights travel in one: their cut says nothing.
    weights = candidates_of("decentralized")
    assert len({(c["hierarchical"], c["channels"]) for c in weights}) == len(weights)
    assert len(candidates_of("async")) == 1


def test_a_job_of_another_algorithm_may_go_to_the_usual_one() -> None:
    baseline = Configuration({**BASELINE, "algorithm": "bytegrad"})
    assert len(candidates_of("gradient_allreduce", baseline)) > 10


def test_combinations_that_are_never_tried_do_not_count() -> None:
    spec = {
        **make_spec().model_dump(),
        "knobs": {knob: domain.model_dump() for knob, domain in SPACE.items()},
        "default_configuration": dict(BASELINE),
    }
    JobSpec.model_validate_json(json.dumps(spec))
    spec["knobs"]["algorithm"] = {"type": "log_integer", "low": 1, "high": 2}
    with pytest.raises(ValidationError, match="algorithm must be a categorical"):
        JobSpec.model_validate_json(json.dumps(spec))


def test_kinds_are_those_that_candidates_have() -> None:
    kinds = kinds_of(SPACE, [BASELINE])
    every = enumerate_candidates(SPACE, BASELINE, SPEC.tensors)
    assert {Kind.of(candidate) for candidate in every} <= set(kinds)
    assert not any(k.wire_precision == "bf16" and k.algorithm == "bytegrad" for k in kinds)


def seconds(model: CostModel, **knobs: int | str) -> float:
    return float(np.exp(model.predict([Configuration({**BASELINE, **knobs})])[0]))


def test_when_weights_travel_by_hand() -> None:
    ready = [1.0, 2.0, 3.0, 4.0]
    members = SPEC.tensors[:4]
    held = sum(tensor.bytes for tensor in members)
    rate = 8.0 / held  # all of it takes 8 s
    kinds = [Kind(algorithm=name) for name in NAMES]
    costs = {kind: Cost(0.5, rate) for kind in kinds}
    model = CostModel(Layouts(members), ready, costs, launch_seconds=0.0)
    whole = {"bucket_bytes": 64 * MIB}
    assert seconds(model, **whole) == pytest.approx(4.0 + 8.5)
    # From the step's begin, beside all computing.
    assert seconds(model, **whole, algorithm="decentralized") == pytest.approx(8.5)
    # After it.
    late = {**whole, "algorithm": "low_precision_decentralized"}
    assert seconds(model, **late) == pytest.approx(4.0 + 8.5)
    assert seconds(model, **whole, algorithm="async") == pytest.approx(4.0)
    # Communication that is short is hidden, and computing stays.
    fast = CostModel(
        Layouts(members), ready, {kind: Cost(1e-6, 1e-3 * rate) for kind in kinds}, 0.0
    )
    assert seconds(fast, **whole, algorithm="decentralized") == pytest.approx(4.0)


def test_eight_bits_are_expected_to_be_fast_and_weights_tell_nothing_of_buckets() -> None:
    layouts = Layouts(SPEC.tensors[: len(SIZES)])
    kinds = [Kind(algorithm=name) for name in NAMES]
    own, apart = profile(Cost(1e-3, 1e-8)), profile(Cost(1e-9, 1e-15))
    usual = (BASELINE, own)
    weights = (Configuration({**BASELINE, "algorithm": "decentralized"}), apart)
    alone = fit_model(layouts, kinds, [usual])
    both = fit_model(layouts, kinds, [usual, weights])
    assert alone is not None
    assert both is not None
    costs = alone.costs
    assert costs[kinds[1]].seconds_per_byte < 0.5 * costs[kinds[0]].seconds_per_byte
    assert costs[kinds[2]].seconds_per_byte < 0.5 * costs[kinds[1]].seconds_per_byte
    for kind in kinds:
        assert both.costs[kind].seconds_per_byte == pytest.approx(costs[kind].seconds_per_byte)


def test_it_is_said_that_the_numbers_change() -> None:
    assert "algorithm" not in describe(BASELINE)
    words = describe({**BASELINE, "algorithm": "bytegrad"})
    assert words.endswith("algorithm bytegrad (changes the numbers)")
