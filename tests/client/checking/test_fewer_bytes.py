"""How many bytes are left of a step's in fewer bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_client.checking.fewer_bytes import gathered, gradients, shares
from bagua_client.layout import TensorSpec, describe


def specs(module: nn.Module) -> tuple[TensorSpec, ...]:
    return describe(list(module.named_parameters()))


def test_a_replicated_model_can_send_halves_quarters_and_vectors() -> None:
    found = shares(gradients(specs(nn.Conv2d(64, 64, 4))), has_shapes=True)
    weights, biases = 64 * 64 * 16, 64
    assert found["bits16"] == 0.5
    ranges = weights // 1024 + 1
    assert found["bits8"] == pytest.approx(0.25 + 2 * ranges / (weights + biases))
    # Beside the first size all others are columns, as in torch's hook.
    assert found["powersgd"] == pytest.approx((64 + 1024 + biases) / (weights + biases))


def test_what_is_narrow_small_or_no_float_stays_as_it_is() -> None:
    half = gradients(specs(nn.Linear(512, 512).to(torch.bfloat16)))
    assert set(shares(half, has_shapes=True)) == {"bits8", "powersgd"}
    # Of four rows and columns each, vectors are half as many numbers as the matrix.
    assert set(shares(gradients(specs(nn.Linear(4, 4))), has_shapes=True)) == {"bits16", "bits8"}
    whole = TensorSpec("counts", (1000,), 8, "torch.int64", "cpu#0")
    assert shares(gradients([whole]), has_shapes=True) == {}
    sparse = TensorSpec("embedding", (1000, 8), 4, "torch.float32", "cpu#0", is_sparse=True)
    assert shares(gradients([sparse]), has_shapes=True) == {}
    assert shares([], has_shapes=False) == {}


def test_of_a_sharded_model_weights_are_gathered_in_their_own_precision() -> None:
    unit = TensorSpec("layer", (4096,), 4, "torch.float32", "cpu#0")
    # Gathered for both passes, in float32; and then in bfloat16, with gradients in float32.
    for width, left in ((4, 2 / 3 + 1 / 6), (2, (4 + 2) / (4 + 4))):
        gathers = gathered([unit], [(0, 4096 * width)] * 2)
        found = shares([*gradients([unit]), *gathers], has_shapes=False)
        assert found["bits16"] == pytest.approx(left)
        sent = 4 + 2 * width
        assert found["bits8"] == pytest.approx(3 * (1 + 8 / 1024) / sent)
