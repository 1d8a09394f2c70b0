"""Configurations: their domain, and their way to the service and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.configuration import Configuration
from bagua_wire.knobs import KNOBS

configurations = st.builds(
    Configuration,
    bucket_bytes=st.integers(1, 2**40),
    hierarchical=st.sampled_from(KNOBS["hierarchical"].kind.tried),
    channels=st.sampled_from(KNOBS["channels"].kind.tried),
    first_bucket_bytes=st.integers(0, 2**40),
    last_bucket_bytes=st.integers(0, 2**40),
    buckets=st.lists(st.integers(1, 1000)).map(tuple),
)


@given(configuration=configurations)
def test_a_configuration_survives_the_way_to_the_service_and_back(
    configuration: Configuration,
) -> None:
    text = json.dumps(configuration.to_json())
    back = Configuration.from_json(json.loads(text))
    assert back == configuration
    assert hash(back) == hash(configuration)


def test_a_message_without_the_newer_knobs_means_their_defaults() -> None:
    older = {"bucket_bytes": 4096, "hierarchical": "leaders"}
    assert Configuration.from_json(older) == Configuration(4096, "leaders")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bucket_bytes": 0}, "at least 1"),
        ({"bucket_bytes": 1.5}, "whole number"),
        ({"bucket_bytes": True}, "whole number"),
        ({"hierarchical": "tree"}, "one of off, leaders, shards"),
        ({"hierarchical": ["off"]}, "one of off, leaders, shards"),
        ({"channels": 3}, "one of 1, 2, 4, 8, 16, not 3"),
        ({"channels": True}, "one of 1, 2, 4"),
        ({"channels": 2.0}, "one of 1, 2, 4"),
        ({"first_bucket_bytes": -1}, "first_bucket_bytes must be at least 0"),
        ({"last_bucket_bytes": 0.5}, "last_bucket_bytes must be a whole number"),
        ({"buckets": 3}, "list of tensor counts"),
        ({"buckets": {"0": 3}}, "list of tensor counts"),
        ({"buckets": [3, 0]}, "number of tensors must be at least 1"),
        ({"buckets": [3, "1"]}, "number of tensors must be a whole number"),
        ({"buckets": [[1], 2]}, "number of tensors must be a whole number"),
        ({"wire_precision": "bfloat16"}, "one of as_is, bf16, fp16"),
        ({"algorithm": 3}, "algorithm must be a name"),
        ({"compressor": "topk"}, "does not know the knob compressor"),
    ],
)
def test_what_is_outside_the_domain_is_refused_in_words(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Configuration.from_json(values)


@pytest.mark.parametrize(
    ("configuration", "text"),
    [
        (Configuration(4096, "leaders"), "bucket 4 KiB, hierarchical"),
        (Configuration(4096, channels=2), "bucket 4 KiB, 2 channels"),
        (
            Configuration(4096, first_bucket_bytes=1024, last_bucket_bytes=2048),
            "bucket 4 KiB, first bucket 1 KiB, last bucket 2 KiB",
        ),
        (
            Configuration(4096, "shards", 4, first_bucket_bytes=1024, buckets=(3, 5, 1)),
            "3 explicit buckets, hierarchical (sharded), 4 channels",
        ),
        (Configuration(buckets=(3,)), "1 explicit bucket"),
    ],
)
def test_a_log_line_leaves_out_what_is_at_its_default(
    configuration: Configuration, text: str
) -> None:
    assert str(configuration) == text
