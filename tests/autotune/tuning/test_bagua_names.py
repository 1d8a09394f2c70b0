"""Model names of Bagua workers."""

from __future__ import annotations

import pytest

from bagua_autotune.tuning.bagua.hyperparameters import tensor
from bagua_autotune.tuning.bagua.names import family, stem


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [
        ("DistributedDataParallel_V1_9_0_140234234234234", "DistributedDataParallel_V1_9_0"),
        ("Net_94512345678912", "Net"),
        ("resnet_50", "resnet_50"),
        ("bert_20240131", "bert_20240131"),
        ("_140234234234234", "_140234234234234"),
        ("140234234234234", "140234234234234"),
    ],
)
def test_only_an_address_is_cut_off(model_name, expected):
    assert stem(model_name) == expected


def test_this_process_s_addresses_are_recognised():
    class Net: ...

    assert stem(f"Net_{id(Net())}") == "Net"


def test_a_family_is_the_stem_and_the_tensors_in_any_order():
    a, b = tensor("a", 1, "f32"), tensor("b", 2, "f16")
    assert family("Net_140234234234234", [a, b]) == family("Net_140234999999999", [b, a])
    assert family("Net", [a]) != family("Net", [a, b])
    assert family("Net", [a]) != family("Net", [tensor("a", 1, "u8")])
    assert family("Net", [a]) != family("Other", [a])
