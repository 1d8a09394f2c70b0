"""What strangers' trainings do, tuned while they run, is what torch does alone, to the last bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from bagua_client import Configuration
from bagua_client.torch_private import reducer as torchs
from bagua_wire.knobs import MIB
from tests.client.agent.scripted_service import ScriptedService
from tests.client.beside_stock import situations as they
from tests.client.beside_stock.conftest import RUN_SECONDS
from tests.client.beside_stock.tuned_run import Outcome, Training, beside_torch
from tests.client.sharded.models import CAN_MERGE
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

MOST_TRIALS = 20
"""Of each configuration."""
UNIT_BYTES = 288
"""Of a block of these models, so that none is merged with the next."""
# With find_unused_parameters there are no explicit buckets, and units that are not all used are not
# merged.
PLAIN = {
    "replicated": (
        Configuration(1),
        Configuration(400, channels=2),
        Configuration(25 * MIB, first_bucket_bytes=1 if torchs.HAS_BUCKET_CAPS else 0),
    ),
    "sharded": (
        Configuration(UNIT_BYTES, channels=2, scatter_group="own"),
        Configuration(UNIT_BYTES, kept_units=1, channels=4, prefetch=1),
        Configuration(UNIT_BYTES, kept_units=2),
    ),
}
ALL = {
    "replicated": (
        Configuration(25 * MIB, first_bucket_bytes=1),
        Configuration(300, channels=4, last_bucket_bytes=200),
        Configuration(600, channels=2, buckets=(2, 1, 3)),
    )
    if torchs.HAS_BUCKET_CAPS
    else PLAIN["replicated"],
    "sharded": (
        Configuration(UNIT_BYTES, channels=2, scatter_group="own"),
        Configuration(2**20, kept_units=1),
        Configuration(500, channels=4, prefetch=1),
    )
    if CAN_MERGE
    else PLAIN["sharded"],
}


REPLICATED, SHARDED = ("replicated",), ("sharded",)
BOTH = (*REPLICATED, *SHARDED)
# Torch 2.11 fails at a compiled step of a sharded model by itself, and merges no units.
BOTH_SINCE_2_13 = BOTH if CAN_MERGE else REPLICATED


@dataclass(frozen=True)
class Row:
    """A training, and what is to be seen of it.

    Attributes:
        ways: those in which its model communicates.
        tried: what the tuning tries.
        untuned: part of the line that says why it is not tuned, or not to the end; empty: it is.
    """

    training: Training
    ways: Sequence[str] = REPLICATED
    tried: Mapping[str, Sequence[Configuration]] = field(default_factory=lambda: ALL)
    untuned: str = ""


# Both ways where what is in force is carried out by other code.
TABLE = (
    Row(they.lbfgs, SHARDED),
    # Torch itself cannot do this with units that are sharded again.
    Row(they.gradient_penalty),
    # Torch's reducer refuses this.
    Row(they.backward_that_can_be_differentiated, SHARDED),
    Row(they.cached_gradients, SHARDED),
    Row(they.several_optimizers),
    Row(they.accumulation, BOTH),
    Row(they.sharded_optimizer),
    Row(they.deterministic_and_with_anomalies_shown, BOTH),
    Row(they.other_defaults, BOTH_SINCE_2_13),
    Row(they.autocast_and_scaler),
    Row(they.grad_mode_turned_round),
    Row(they.meta_weights, SHARDED),
    Row(they.parametrized, tried=PLAIN),
    Row(they.averaged_copies),
    Row(they.saved_and_loaded),
    Row(they.replaced_storage),
    Row(they.wrapped_again),
    Row(they.other_thread, SHARDED),
    Row(they.own_method),
    Row(they.own_method, SHARDED, untuned="the unit (root) is in use"),
    Row(they.functional),
    Row(they.two_models),
    Row(they.inside_another, tried=PLAIN),
    Row(they.changed_flags, tried=PLAIN),
    Row(they.compiled_step, BOTH_SINCE_2_13),
    Row(they.own_collectives),
    Row(they.own_hooks),
    Row(they.step_tried_again),
    Row(they.one_shard, SHARDED, untuned="each rank holds the whole model"),
)


def _trained(
    ranks: RankPool, row: Row, way: str, is_spoilt: bool = False
) -> tuple[list[Outcome], list[str]]:
    """Of each rank; and why the ranks disagreed on what they were to change."""
    rounds = [[each.to_json() for each in row.tried[way] * MOST_TRIALS]]
    with ScriptedService(rounds, steps=1) as service:
        outcomes = ranks.run(
            beside_torch,
            *(row.training, way == "sharded", service.url, row.tried[way], is_spoilt),
            timeout_seconds=RUN_SECONDS,
        )
        return outcomes, [each["message"] for each in service.bodies("disagreement")]


CASES = {f"{row.training.__name__}-{way}": (row, way) for row in TABLE for way in row.ways}


@pytest.mark.parametrize(("row", "way"), CASES.values(), ids=list(CASES))
def test_it_trains_as_with_torch_alone(pair_of_ranks: RankPool, row: Row, way: str) -> None:
    outcomes, disagreements = _trained(pair_of_ranks, row, way)
    assert [each.differences for each in outcomes] == [[], []]
    said = [line for each in outcomes for line in each.warnings]
    if row.untuned:
        assert outcomes[0].tuning in ("off", "failed")
        assert any(row.untuned in line for line in said)
        # What comes after that, up to the model's end, is no other error.
        assert all(row.untuned in line for line in said if "an error" in line)
        return
    assert said == disagreements == []
    assert outcomes[0].configurations == outcomes[1].configurations
    were = {each for models in outcomes[0].configurations for each in models}
    assert were.issuperset(row.tried[way])


def test_a_gradient_that_is_wrong_by_its_last_bits_is_found(pair_of_ranks: RankPool) -> None:
    outcomes, _ = _trained(pair_of_ranks, Row(they.accumulation), "replicated", is_spoilt=True)
    for found in outcomes:
        kinds = {name.split()[0] for name in found.differences}
        assert kinds == {"loss", "model", "optimizer"}
        assert "torch's random numbers" not in found.differences
