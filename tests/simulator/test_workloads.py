"""Around a simulation: the catalog of models, bandwidths and times as people write them, cutting by
the client's rule, and finding the best configuration."""

from __future__ import annotations

from itertools import product

import pytest

from bagua_simulator import Simulator, cases
from bagua_simulator.cluster import (
    describe_bandwidth,
    describe_duration,
    parse_bandwidth,
    parse_duration,
)
from bagua_simulator.simulator import Layouts
from bagua_simulator.sweep import find_best, sweep
from bagua_simulator.workloads import CATALOG, load
from tests.simulator.jobs import MIB, make_cluster, make_tensors, make_workload

pytestmark = pytest.mark.slow


# Of the published models: parameters, tensors (a tied weight counts once).
PUBLISHED = {
    "vgg16": (138_357_544, 32),
    "resnet50": (25_557_032, 161),
    "bert-base": (110_106_428, 206),
    "bert-large": (336_226_108, 398),
    "gpt2-small": (124_439_808, 148),
    "gpt2-medium": (354_823_168, 292),
}


@pytest.mark.parametrize("name", CATALOG)
def test_the_models_have_the_parameters_that_are_published(name: str) -> None:
    tensors = load(name).tensors
    assert (sum(tensor.elements for tensor in tensors), len(tensors)) == PUBLISHED[name]
    assert len({tensor.name for tensor in tensors}) == len(tensors)


def test_gradients_become_ready_from_the_last_layer_to_the_first() -> None:
    names = {name: [tensor.name for tensor in load(name).tensors] for name in CATALOG}
    assert names["vgg16"][0] == "classifier.6.bias"
    assert names["resnet50"][-1] == "conv1.weight"
    # The embedding is the output layer's weight too, and complete only at the end.
    assert names["bert-large"][-1] == "bert.embeddings.word_embeddings.weight"
    assert names["gpt2-medium"][-1] == "transformer.wte.weight"


def test_a_computed_step_has_the_published_throughput() -> None:
    assert load("resnet50").compute_seconds == pytest.approx(128 / 1200)
    assert load("bert-large").compute_seconds == pytest.approx(7 / 24.29)


def test_the_cases_differ_in_what_is_best() -> None:
    found = cases()
    assert len(found) >= 20
    assert len({case.name for case in found}) == len(found)
    gains, kinds, sizes = [], set(), set()
    for case in found:
        simulator = case.simulator
        times = {
            (size, kind): simulator.step_seconds({"bucket_bytes": size, "hierarchical": kind})
            for size in [2**power for power in range(17, 30, 2)]
            for kind in ("off", "leaders")
        }
        size, kind = min(times, key=times.__getitem__)
        sizes.add(size)
        kinds.add(kind)
        gains.append(simulator.step_seconds(simulator.default) / times[size, kind])
    assert kinds == {"off", "leaders"}
    assert len(sizes) >= 4
    assert min(gains) < 1.01
    assert max(gains) > 1.2


BANDWIDTHS = {"25Gbit": 25e9 / 8, "100 Gbit/s": 100e9 / 8, "200Mbit": 200e6 / 8, "10Gbps": 10e9 / 8}
DURATIONS = {"100us": 1e-4, "2ms": 2e-3, "0.5 s": 0.5, "800ns": 8e-7}


def test_bandwidths_and_latencies_are_read_and_described_as_they_are_written() -> None:
    for text, value in {**BANDWIDTHS, "1GB": 1e9, "1.5GB/s": 1.5e9, "800bit": 100.0}.items():
        assert parse_bandwidth(text) == pytest.approx(value)
    assert [parse_duration(text) for text in DURATIONS] == pytest.approx([*DURATIONS.values()])
    assert describe_bandwidth(parse_bandwidth("25Gbit")) == "25 Gbit/s"
    assert describe_bandwidth(parse_bandwidth("200Mbit")) == "200 Mbit/s"
    assert describe_duration(parse_duration("100us")) == "100 us"
    assert describe_duration(parse_duration("2ms")) == "2 ms"


def test_what_is_no_bandwidth_or_latency_is_refused_with_an_example() -> None:
    for text in ("", "25", "25Gb", "fast", "-1GB", "0Gbit", "1.2.3GB", "1GBit ms"):
        with pytest.raises(ValueError, match="write it like 25Gbit"):
            parse_bandwidth(text)
    for text in ("", "100", "100m", "-1ms", "0us", "1e999s"):
        with pytest.raises(ValueError, match="write it like 100us"):
            parse_duration(text)


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    sizes = [MIB // 2, MIB // 64] * 40
    return Simulator(make_workload(sizes, milliseconds=1.0), make_cluster(latency_seconds=2e-4))


def test_the_best_is_about_the_best_of_all(simulator: Simulator) -> None:
    everything = min(
        simulator.step_seconds(
            {
                "bucket_bytes": round(2 ** (half / 2)),
                "hierarchical": hierarchical,
                "channels": channels,
                "first_bucket_bytes": first,
                "last_bucket_bytes": last,
            }
        )
        for half, hierarchical, channels, first, last in product(
            range(32, 61, 2), ("off", "leaders", "shards"), (1, 2, 4), (0, MIB, 4 * MIB),
            (0, MIB, 4 * MIB),
        )
    )  # fmt: skip
    assert find_best(simulator).step_seconds <= everything * 1.005


def test_a_sweep_covers_all_sizes_and_ways_of_reducing(simulator: Simulator) -> None:
    found = sweep(simulator)
    assert list(found.lines) == ["off", "leaders", "shards"]
    sizes = [point.configuration.number("bucket_bytes") for point in found.lines["off"]]
    assert (sizes[0], sizes[-1], len(sizes)) == (64 * 1024, 1024 * MIB, 29)
    assert found.speedup >= 1
    assert found.title == "small on 4 x 2 ranks, 8 Gbit/s, 200 us"


def test_an_explicit_list_that_does_not_fit_is_refused() -> None:
    fitting = Layouts(make_tensors([10, 20, 30, 40])).cut({"buckets": (1, 3), "bucket_bytes": 1})
    assert [(bucket.bytes, bucket.last) for bucket in fitting] == [(40, 0), (360, 3)]
    with pytest.raises(ValueError, match="hold 3 tensors, but the model has 4"):
        Layouts(make_tensors([1] * 4)).cut({"buckets": (1, 2)})
    mixed = Layouts(make_tensors([1] * 4, ("torch.float32", "torch.bfloat16")))
    with pytest.raises(ValueError, match="mixes groups"):
        mixed.cut({"buckets": (1, 3)})


def test_the_first_and_the_last_bucket_may_be_smaller() -> None:
    layouts = Layouts(make_tensors([MIB // 4] * 20))  # 1 MiB each

    def counts(**knobs: int) -> list[int]:
        ends = [bucket.last + 1 for bucket in layouts.cut({"bucket_bytes": 8 * MIB, **knobs})]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    assert counts() == [8, 8, 4]
    assert counts(first_bucket_bytes=MIB) == [1, 8, 8, 3]
    assert counts(last_bucket_bytes=MIB) == [8, 8, 3, 1]
    assert counts(first_bucket_bytes=4 * MIB, last_bucket_bytes=4 * MIB) == [4, 8, 4, 4]
