"""Losses, states and random numbers are those of an untouched model, bit for bit, however many
blocks are recomputed from one step to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.client.tunable.recomputed.models import Kind, differs
from tests.integrations.arms import needs

UNITS: tuple[Mapping[str, Any], ...] = (
    {"kept_units": 3},
    {"bucket_bytes": 2**20},
    {"kept_units": 4, "bucket_bytes": 2**20, "channels": 2},
    {},
)
OVER_MICRO_BATCHES: tuple[Mapping[str, Any], ...] = (
    {"kept_units": 4, "kept_over_micro_batches": "on"},
    {},
)
BUCKETS: tuple[Mapping[str, Any], ...] = ({"bucket_bytes": 400}, {"channels": 2}, {})
KINDS: Mapping[str, tuple[Kind, str]] = {
    # In what way they are recomputed.
    "wrapper": (Kind(), "alone replicated sharded copies"),
    "reentrant": (Kind("reentrant"), "alone replicated sharded"),
    "selective": (Kind("selective"), "alone sharded"),
    "to the end": (Kind("to the end"), "alone replicated"),
    "composable": (Kind("composable"), "alone replicated sharded"),
    "no dropout": (Kind("random state lost", dropout=0.0), "alone"),
    "older transformers": (Kind("older transformers"), "alone replicated sharded"),
    "older, reentrant": (Kind("older transformers, reentrant"), "alone"),
    "gpt2": (Kind("gpt2"), "replicated sharded"),
    "gpt2 reentrant": (Kind("gpt2 reentrant"), "alone"),
    "llama reentrant": (Kind("llama reentrant"), "sharded"),
    "mixtral": (Kind("mixtral"), "alone"),
    "peft": (Kind("llama reentrant", inner="lora"), "alone"),
    # What is in the blocks.
    "lora": (Kind(inner="lora"), "alone replicated sharded"),
    "lora, reentrant": (Kind("reentrant", inner="lora"), "alone replicated"),
    "experts": (Kind(inner="experts"), "alone replicated sharded"),
    "nested": (Kind(inner="nested"), "alone sharded"),
    "frozen and tied": (Kind(frozen=True, tied=True), "replicated sharded"),
    "compiled inside": (Kind(compiles="inside"), "alone sharded"),
    "compiled around": (Kind(compiles="around"), "alone replicated"),
    # How they are trained.
    "micro-batches, clipped": (
        Kind(micro_batches=3, clips=True),
        "alone replicated sharded copies",
    ),
    "autocast": (Kind(autocast=True), "alone replicated"),
    "evaluation in between": (Kind(between="evaluation"), "alone sharded"),
    "two passes, then one back": (Kind(between="two passes"), "alone replicated sharded"),
    "saved and resumed": (Kind(between="resumed"), "alone replicated sharded"),
    "static graph": (Kind(static_graph=True), "replicated"),
    "static graph, resumed": (Kind(static_graph=True, between="resumed"), "replicated"),
    "buckets cut anew": (Kind(also=BUCKETS), "replicated"),
    "merged and kept units": (Kind(also=UNITS), "sharded"),
    "kept over micro-batches": (
        Kind(micro_batches=3, clips=True, also=OVER_MICRO_BATCHES),
        "sharded",
    ),
    "merged and kept, resumed": (Kind(also=UNITS, between="resumed", micro_batches=2), "copies"),
}
BY_DEFAULT = ("wrapper", "micro-batches, clipped", "merged and kept units")
"""On two ranks; by one process everything is quick."""


def _marks(name: str, kind: Kind, ranks: str) -> list[pytest.MarkDecorator]:
    lacking = [needs("peft")] * (name == "peft")
    lacking += [needs("transformers")] * (kind.way.split()[0] in ("gpt2", "llama", "mixtral"))
    is_quick = ranks == "alone" or (ranks != "copies" and name in BY_DEFAULT)
    return lacking + [pytest.mark.slow] * (not is_quick)


CASES = [
    pytest.param(replace(kind, ranks=each), id=f"{name} {each}", marks=_marks(name, kind, each))
    for name, (kind, ranks) in KINDS.items()
    for each in ranks.split()
]


@pytest.mark.parametrize("kind", CASES)
def test_any_sequence(request: pytest.FixtureRequest, kind: Kind, tmp_path: Path) -> None:
    asked = kind, request.node.name, str(tmp_path)
    if kind.ranks == "alone":
        assert differs(*asked) == ""
        return
    pool = request.getfixturevalue("four_ranks" if kind.ranks == "copies" else "two_ranks")
    assert pool.run(differs, *asked) == [""] * pool.world_size
