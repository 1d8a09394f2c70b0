"""Configurations: their domain, and their way to the service and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.configuration import HIERARCHICAL_VALUES, Configuration

configurations = st.builds(
    Configuration, st.integers(1, 2**40), st.sampled_from(HIERARCHICAL_VALUES)
)


def test_the_default_is_torchs() -> None:
    assert Configuration() == Configuration(bucket_bytes=25 * 1024 * 1024, hierarchical="off")


@given(configuration=configurations)
def test_a_configuration_survives_the_way_to_the_service_and_back(
    configuration: Configuration,
) -> None:
    assert Configuration.from_json(configuration.to_json()) == configuration


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bucket_bytes": 0}, "at least 1"),
        ({"bucket_bytes": -5}, "at least 1"),
        ({"bucket_bytes": 1.5}, "whole number"),
        ({"bucket_bytes": True}, "whole number"),
        ({"bucket_bytes": "1 MiB"}, "whole number"),
        ({"bucket_bytes": None}, "whole number"),
        ({"hierarchical": True}, "one of off, leaders, shards"),
        ({"hierarchical": "tree"}, "one of off, leaders, shards"),
        ({"channels": 4}, "does not know the knob channels"),
    ],
)
def test_what_is_outside_the_domain_is_refused_in_words(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Configuration.from_json(values)


@pytest.mark.parametrize(
    ("bucket_bytes", "text"),
    [
        (2**30, "1 GiB"),
        (25 * 2**20, "25 MiB"),
        (65536, "64 KiB"),
        (1000 * 2**20, "1000 MiB"),
        (3, "3 B"),
    ],
)
def test_a_log_line_has_the_size_in_its_unit(bucket_bytes: int, text: str) -> None:
    assert str(Configuration(bucket_bytes)) == f"bucket {text}, hierarchical off"
