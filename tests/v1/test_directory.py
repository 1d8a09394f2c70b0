"""Model names of Bagua workers."""

from __future__ import annotations

import pytest

from bagua_v1.directory import family_key, stem
from bagua_v1.hyperparameters import tensor

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [
        ("DistributedDataParallel_V1_9_0_140234234234234", "DistributedDataParallel_V1_9_0"),
        ("Net_94512345678912", "Net"),
        ("Net_548123456789", "Net"),
        ("resnet_50", "resnet_50"),
        ("run_1700000000", "run_1700000000"),
        ("run_20240131120000123", "run_20240131120000123"),
        ("run_012345678901", "run_012345678901"),
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


def test_a_family_is_the_stem_the_tensors_in_any_order_and_what_it_is_tuned_with():
    a, b = tensor("a", 1, "f32"), tensor("b", 2, "f16")

    def key(name="Net_140234234230000", tensors=(a, b), world_size=2, default_bytes=10):
        return family_key(name, tensors, world_size, default_bytes)

    assert key() == key("Net_140234999999999", (b, a)) == key("Net")
    others = [
        key("Other_140234234230000"),
        key(tensors=[a]),
        key(tensors=[a, tensor("b", 2, "u8")]),
        key(world_size=4),
        key(world_size=None),
        key(default_bytes=11),
    ]
    assert len({key(), *others}) == 7
