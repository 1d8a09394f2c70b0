"""Engines of which nothing can be tuned say so, and train as they do."""

from __future__ import annotations

from typing import Any

import pytest

import bagua_client
from bagua_client.zero.buckets import PREFETCH, refusal_of
from tests.client.zero.models import Kind, deepspeed_on_cpu, engine_of, needs_deepspeed, train
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, needs_deepspeed]
ON_CPU = {"device": "cpu", "pin_memory": False}


def _said(kind: Kind) -> str:
    engine = bagua_client.tune(engine_of(kind))
    said = refusal_of(engine)
    with pytest.raises(RuntimeError, match="cannot be changed"):
        engine.reconfigure(bagua_client.Configuration())
    assert engine.tuning.state == "off"
    assert len(train(engine, kind, {}, 2)) == 2
    engine.destroy()
    return said


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind(0), "ZeRO is off (stage 0)"),
        (Kind(3, zero={"reduce_scatter": False}), "reduce_scatter is off"),
    ],
)
def test_what_an_engine_says(two_ranks: RankPool, kind: Kind, said: str) -> None:
    for found in two_ranks.run(_said, kind):
        assert said in found


def _where_names_differ() -> list[str]:
    """As another release may have it."""
    deepspeed_on_cpu()
    engine, found = engine_of(Kind(3)), []
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    size = vars(coordinator).pop(PREFETCH)
    found.append(refusal_of(engine))
    vars(coordinator)[PREFETCH] = size
    buckets = vars(engine.optimizer).pop("ipg_buckets")
    found.append(refusal_of(engine))
    engine.optimizer.ipg_buckets = buckets
    found.append(refusal_of(engine))
    engine.destroy()
    return found


def test_another_release_is_refused_and_not_an_error(two_ranks: RankPool) -> None:
    for *lacking, whole in two_ranks.run(_where_names_differ):
        for said, name in zip(lacking, (PREFETCH, "ipg_buckets"), strict=True):
            assert "this release of DeepSpeed keeps its bucket sizes elsewhere" in said
            assert name in said
        assert whole == ""


def _another_algorithm() -> str:
    engine: Any = engine_of(Kind())
    with pytest.raises(ValueError, match="not for an engine of DeepSpeed") as error:
        bagua_client.tune(engine, algorithm="bytegrad")
    assert not hasattr(type(engine), "reconfigure")
    return str(error.value)


def test_it_has_no_other_algorithm(two_ranks: RankPool) -> None:
    assert "bytegrad" in two_ranks.run(_another_algorithm)[0]
