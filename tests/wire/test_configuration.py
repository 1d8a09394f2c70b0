from __future__ import annotations

from bagua_wire.configuration import Configuration


def test_equal_configurations_are_one_key_whatever_their_order() -> None:
    first = Configuration(bucket_bytes=1, hierarchical="off")
    second = Configuration({"hierarchical": "off", "bucket_bytes": 1})
    assert first == second
    assert {first: "found"}[second] == "found"
    assert first != Configuration(bucket_bytes=2, hierarchical="off")


def test_a_list_of_buckets_may_come_as_json_has_it() -> None:
    from_json = Configuration({"bucket_bytes": 1, "buckets": [3, 1]})  # type: ignore[dict-item]
    assert from_json == Configuration(bucket_bytes=1, buckets=(3, 1))
    assert hash(from_json) == hash(Configuration(bucket_bytes=1, buckets=(3, 1)))
