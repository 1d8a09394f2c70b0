"""The catalog: real models, and cases that are worth tuning."""

from __future__ import annotations

import pytest

from bagua_simulator import cases
from bagua_simulator.workloads import CATALOG, load

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
