"""The table of what limits a training: the same row says what is tried, told and refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_client.algorithms import find
from bagua_client.configuration import Configuration
from bagua_client.tunable.offer import Limit, Offer, only
from bagua_wire.knobs import MIB

WHY = "there is one channel"


@dataclass(frozen=True, kw_only=True)
class Made(Offer):
    """Of these rows."""

    kind = "replicated"
    rows: dict[str, Limit]

    def limits(self) -> dict[str, Limit]:
        return {"bucket_bytes": Limit((MIB, 25 * MIB)), **self.rows}


TWO_RANKS = cast(Any, SimpleNamespace(world_size=2))


def _offer(default: Configuration | None = None, **rows: Limit) -> Made:
    return Made(
        default=default or Configuration(),
        communicator=TWO_RANKS,
        rows=rows,
    )


def test_a_value_that_cannot_be_had_is_not_tried_and_refused_where_it_is_asked_for() -> None:
    offer = _offer(channels=Limit((1, 2), f"one channel: {WHY}", only(1, WHY)))
    assert "channels" not in offer.values()
    assert offer.reasons() == [f"one channel: {WHY}"]
    offer.check(Configuration())
    with pytest.raises(ValueError, match=WHY):
        offer.check(Configuration(channels=2))


def test_the_service_is_told_of_one_value_only_where_the_row_says_so() -> None:
    row = Limit((1,))
    assert "channels" not in _offer(channels=row).values()
    assert _offer(channels=row._replace(fewest=1)).values()["channels"] == [1]


def test_a_knob_without_a_row_is_tried_from_its_default_on() -> None:
    offer = _offer(Configuration(first_bucket_bytes=MIB))
    assert offer.values()["first_bucket_bytes"] == [MIB, 0, 4 * MIB]
    assert offer.bucket_bytes == (MIB, 25 * MIB)
    assert offer.has_explicit_buckets
    assert not _offer(buckets=Limit(cannot=only((), WHY))).has_explicit_buckets


def test_what_changes_the_numbers_is_tried_only_where_it_is_allowed() -> None:
    def algorithms(allowed: Any) -> list[Any]:
        return [find(name) for name in ("gradient_allreduce", *sorted(allowed & {"bytegrad"}))]

    offer = Made(
        default=Configuration(),
        communicator=TWO_RANKS,
        algorithms=algorithms,
        rows={"algorithm": Limit()},
    )
    assert not {"wire_precision", "algorithm"} & offer.values(set()).keys()
    found = offer.values({"fp16", "bytegrad"})
    assert found["wire_precision"] == ["as_is", "fp16"]
    assert found["algorithm"] == ["gradient_allreduce", "bytegrad"]


def test_of_what_nothing_is_sent_by_a_single_rank_tries_nothing() -> None:
    offer = Made(
        default=Configuration(),
        communicator=cast(Any, SimpleNamespace(world_size=1)),
        algorithms=lambda allowed: [find(name) for name in ("gradient_allreduce", *allowed)],
        rows={"channels": Limit((1, 2), f"one channel: {WHY}")},
        recomputed=Limit((4, 2, 0), changes=WHY),
    )
    assert (offer.reasons(), offer.bucket_bytes, offer.values(["bytegrad"])) == ([], None, {})
    assert offer.values(["bytegrad", "recomputed_blocks"]) == {"recomputed_blocks": [4, 2, 0]}
    assert offer.has_choice(["recomputed_blocks"])
