"""Narrower models: the same layers and operations, gradients of the size that was asked for."""

from __future__ import annotations

import pytest

from bagua_simulator.workloads import CATALOG, architecture
from benchmarks.support.workloads.sleeping import scaled

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("gradient_bytes", [2_000_000, 20_000_000, 100_000_000])
@pytest.mark.parametrize("name", CATALOG)
def test_gradients_come_to_the_size_and_layers_stay(name: str, gradient_bytes: int) -> None:
    full = architecture(name)
    narrow = scaled(full, gradient_bytes)
    tensors = narrow.workload().tensors
    assert sum(tensor.bytes for tensor in tensors) == pytest.approx(gradient_bytes, rel=0.01)
    assert min(tensor.elements for tensor in tensors) >= 1
    assert [layer.operations for layer in narrow.layers] == [
        layer.operations for layer in full.layers
    ]
    assert narrow.workload().ready_seconds == full.workload().ready_seconds
    assert [t.name for t in tensors] == [t.name for t in full.workload().tensors]


def test_a_size_below_one_element_for_each_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="resnet50 cannot be scaled to 100 bytes"):
        scaled(architecture("resnet50"), 100)
