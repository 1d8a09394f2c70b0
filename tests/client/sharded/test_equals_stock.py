"""Losses and weights are those of an untouched model, bit for bit, whatever is changed between its
steps, and however it is sharded and trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule

import bagua_client
from bagua_client.communication.link import Link
from bagua_client.integrations.sharded_model import tunable_of
from bagua_client.sharded import settings as bagua_settings
from tests.client.sharded.models import (
    CAN_MERGE,
    WIDTH,
    Kind,
    differs,
    possible,
    sharded,
    state_of,
    train,
)
from tests.ranks import RankPool

CHANGES = st.fixed_dictionaries(
    {},
    optional={
        # A block has 360 bytes: alone, two, three, and all in one.
        "bucket_bytes": st.sampled_from([360, 700, 1000, 5000]),
        "kept_units": st.integers(0, 4),
        "channels": st.sampled_from([1, 2, 4]),
        "prefetch": st.integers(0, 3),
        "scatter_group": st.sampled_from(["shared", "own"]),
        "scatter_buffers": st.sampled_from([1, 2, 4]),
    },
)
SEQUENCE: dict[int, dict[str, Any]] = {
    1: {"kept_units": 3},
    3: {"channels": 4, "scatter_group": "own"},
    4: {"bucket_bytes": 700, "kept_units": 3},
    5: {"kept_units": 1, "channels": 2, "prefetch": 2},
    6: {"bucket_bytes": 5000, "channels": 4, "prefetch": 1},
    7: {"kept_units": 4, "scatter_buffers": 4},
    8: {"bucket_bytes": 1000, "kept_units": 4},
    9: {},
}
KINDS = {
    "activation-checkpoints": Kind(checkpoints=True),
    "micro-batches-reduced-each": Kind(micro_batches=(4, 4, 2, 5, 1), awaits="", clips=True),
    # What units are merged or parted in is set on some of them only.
    "uneven-steps": Kind(micro_batches=(2, 1)),
    "uneven-and-gathered": Kind(micro_batches=(2, 1), awaits="reshard", clips=True),
    "set-while-merged": Kind(divides_from=5),
    "newer-calls-while-merged": Kind(calls_from=5),
    "frozen-while-merged": Kind(freezes_from=4, param_dtype=torch.bfloat16),
    "own-reductions": Kind(reduces_from=0),
    "own-reductions-later": Kind(reduces_from=6),
    "own-hooks": Kind(hooks=True, param_dtype=torch.bfloat16),
    "offloaded-and-frozen": Kind(offloads=True, frozen=True),
    "ignored-and-tied": Kind(ignores=True, tied=True),
    # Weights that were gathered before the optimizer's step are not used after it.
    "compiled-blocks-evaluated-before-step": Kind(compiles="blocks", between="evaluation"),
    "compiled-model": Kind(compiles="model"),
    "all-kept-by-the-user": Kind(user_keeps=True),
    "dropped-graph": Kind(between="dropped graph"),
    "no-optimizer": Kind(between="no optimizer"),
}


@settings(max_examples=4)
@given(st.dictionaries(st.integers(3, 9), CHANGES, min_size=4))
@pytest.mark.slow
def test_any_sequence_of_changes(two_ranks: RankPool, changes: dict[int, dict[str, Any]]) -> None:
    assert two_ranks.run(differs, Kind(), changes) == ["", ""]


@pytest.mark.slow
def test_copies_of_a_sharded_model(four_ranks: RankPool) -> None:
    assert four_ranks.run(differs, Kind(replicas=2), SEQUENCE) == [""] * 4
    accumulating = Kind(replicas=2, micro_batches=(2,), awaits="all-reduce")
    assert four_ranks.run(differs, accumulating, SEQUENCE) == [""] * 4


def _few(kinds: Mapping[str, Kind], *always: str) -> list[Any]:
    """The others are tried with the slow tests."""
    slow = pytest.mark.slow
    return [
        pytest.param(kind, id=name, marks=[] if name in always else [slow])
        for name, kind in kinds.items()
    ]


TENSORS, EXPERTS = Kind(tensor_ranks=2), Kind(width=8, expert_ranks=2)
TWO_DIMENSIONS = {
    "tensors": TENSORS,  # Of which one rank has more than the other.
    "experts": EXPERTS,
    # Which it has alone: they are not gathered at all.
    "experts-of-one-rank-of-the-same-call": replace(EXPERTS, expert_ranks=4, experts_share=True),
}


@pytest.mark.parametrize("kind", _few(TWO_DIMENSIONS, "tensors"))
def test_what_something_else_has_split_before(four_ranks: RankPool, kind: Kind) -> None:
    """By tensor or expert parallelism: units that are spread over a part of the ranks."""
    if kind.experts_share and not hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers"):
        pytest.skip("torch before 2.12 has one mesh for each call")
    assert four_ranks.run(differs, kind, SEQUENCE) == [""] * 4


SHARE = replace(EXPERTS, experts_share=True)


@settings(max_examples=4)
@given(
    st.sampled_from([TENSORS, EXPERTS, SHARE]),
    st.dictionaries(st.integers(3, 9), CHANGES, min_size=4),
)
@pytest.mark.slow
def test_any_sequence_of_changes_of_two_dimensions(
    four_ranks: RankPool, kind: Kind, changes: dict[int, dict[str, Any]]
) -> None:
    assert four_ranks.run(differs, kind, changes) == [""] * 4


@pytest.mark.slow
def test_what_two_dimensions_do_in_several_micro_batches(four_ranks: RankPool) -> None:
    several: dict[str, Any] = {"micro_batches": (3, 2), "awaits": "", "checkpoints": True}
    kind = replace(TENSORS, clips=True, **several)
    assert four_ranks.run(differs, kind, KEPT_ON, 12) == [""] * 4
    if not CAN_MERGE:
        pytest.skip("torch before 2.13 places no experts' parameters by themselves")
    kind = replace(SHARE, **several)
    told, by_hand = (
        replace(kind, tells="ours"),
        replace(kind, awaits="gradient sync", awaits_from=3),
    )
    assert four_ranks.run(differs, told, DEFERRED, 12, by_hand) == [""] * 4


@pytest.mark.slow
def test_copies_of_what_tensor_parallelism_has_split() -> None:
    """Two copies, spread over two ranks each, of which each has half of the weights."""
    ranks = RankPool([4, 4])
    kind = Kind(replicas=2, tensor_ranks=2, clips=True, micro_batches=(2,), awaits="all-reduce")
    assert ranks.run(differs, kind, SEQUENCE, timeout_seconds=300) == [""] * 8
    ranks.close()


OF_WHOLE = ("bucket_bytes", "channels", "scatter_buffers")
"""Of a model of which each rank holds the whole nothing else is changed in ``SEQUENCE``."""


WHOLE = {
    "micro-batches": Kind(micro_batches=(3, 2), clips=True),
    "reduced-each": Kind(
        micro_batches=(3,), awaits="", clips=True, checkpoints=True, param_dtype=torch.bfloat16
    ),
    "summed-in-the-last": Kind(micro_batches=(2,), awaits="all-reduce"),
    "frozen-and-tied": Kind(frozen=True, tied=True, hooks=True, between="evaluation"),
    "frozen-while-merged": Kind(freezes_from=4, skips=3),
}


@pytest.mark.parametrize("kind", _few(WHOLE, "frozen-and-tied"))
def test_a_model_that_each_rank_holds_whole(two_ranks: RankPool, kind: Kind) -> None:
    changes = {
        step: {knob: value for knob, value in change.items() if knob in OF_WHOLE}
        for step, change in SEQUENCE.items()
    }
    assert two_ranks.run(differs, replace(kind, replicates=True), changes) == ["", ""]


def _stripes_between_copies(channels: int) -> set[int]:
    """The numbers of process groups on which gradients were summed over the copies by ours."""
    seen = set()
    torchs = Link.all_reduce

    def spy(link: Link, whole: torch.Tensor, op: Any) -> None:
        seen.add(len(link._groups))
        torchs(link, whole, op)

    with mock.patch.object(Link, "all_reduce", spy):
        changes = {3: {"channels": channels}, 6: {}}
        assert differs(Kind(replicas=2), changes) == ""
    return seen


@pytest.mark.slow
def test_the_sum_over_copies_travels_on_as_many_channels(four_ranks: RankPool) -> None:
    assert four_ranks.run(_stripes_between_copies, 4) == [{4}] * 4


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[RankPool]:
    ranks = RankPool([2, 2])
    yield ranks
    ranks.close()


IN_EACH_NODE = {
    "plain": Kind(),
    "no-optimizer": Kind(between="no optimizer", param_dtype=torch.bfloat16),
    "user-spreads": Kind(ranks_after_forward=2),
    "tied-and-frozen": Kind(tied=True, frozen=True, checkpoints=True, between="dropped graph"),
    "experts": EXPERTS,
}


@pytest.mark.parametrize("kind", _few(IN_EACH_NODE, "plain"))
def test_a_copy_in_each_node(two_nodes: RankPool, kind: Kind) -> None:
    copy = {"node_copy": "off" if kind.ranks_after_forward else "on"}
    changes = {step: {**change, **copy} for step, change in SEQUENCE.items() if change}
    assert two_nodes.run(differs, kind, {**changes, 9: {}}) == [""] * 4


def _gathered_again(**changes: Any) -> list[tuple[bool, int]]:
    """For each unit: whether it is spread over fewer ranks from forward to backward, and over how
    many it is gathered then."""
    model: Any = bagua_client.tune(sharded(Kind()))
    train(model, Kind(), {}, 1)
    units = tunable_of(model).units
    assert model.reconfigure(replace(model.configuration, **changes))
    train(model, Kind(), {}, 3)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    found = [
        (unit.is_spread_narrowly, dist.get_world_size(unit.group._all_gather_process_group))
        for unit in units
    ]
    loss.backward()
    return found


@pytest.mark.slow
def test_with_a_copy_in_each_node_the_backward_pass_gathers_inside_it(two_nodes: RankPool) -> None:
    spread, whole = (True, 2), (False, 4)
    changes: dict[str, Any] = {"node_copy": "on"}
    for algorithm in ("", "quantized"):
        found = two_nodes.run(partial(_gathered_again, **changes, algorithm=algorithm))
        assert found == [[whole, *[spread] * 4]] * 4
    found = two_nodes.run(partial(_gathered_again, **changes, kept_units=1))
    assert found == [[whole, *[spread] * 3, whole]] * 4
    assert two_nodes.run(_gathered_again) == [[whole] * 5] * 4


@pytest.mark.slow
def test_parameters_spread_over_fewer_ranks_after_forward(four_ranks: RankPool) -> None:
    kind = Kind(ranks_after_forward=2, between="evaluation after step")
    assert four_ranks.run(differs, kind, SEQUENCE) == [""] * 4


@pytest.mark.parametrize(
    "kind",
    _few(
        KINDS,
        *("activation-checkpoints", "ignored-and-tied", "own-hooks"),
        *("own-reductions", "set-while-merged"),
    ),
)
def test_ways_to_train(two_ranks: RankPool, kind: Kind) -> None:
    changes = dict(SEQUENCE)
    if kind.reduces_from >= 0 and not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        pytest.skip("torch before 2.9 has no such objects")
    if kind.divides_from and not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        pytest.skip("this torch cannot divide so over gloo")
    if kind.user_keeps:
        changes = {1: {"channels": 2}, 4: {"prefetch": 1}}
    if kind.freezes_from:
        changes = {3: {"bucket_bytes": 700}, 4: {"bucket_bytes": 5000}}
    if kind.reduces_from >= 0:
        changes = {1: {"kept_units": 3}, 8: {"kept_units": 4, "prefetch": 1}}
    if kind.reduces_from == 0:
        changes |= {4: {"bucket_bytes": 700}, 6: {"bucket_bytes": 5000}}
    assert two_ranks.run(differs, kind, changes) == ["", ""]


KEPT_ON: dict[int, dict[str, Any]] = {
    1: {"kept_units": 4, "kept_over_micro_batches": "on"},
    5: {"bucket_bytes": 700, "kept_units": 3, "kept_over_micro_batches": "on"},
    7: {"kept_units": 2, "channels": 2, "prefetch": 2, "kept_over_micro_batches": "on"},
    9: {"kept_units": 4},
    10: {"bucket_bytes": 5000, "kept_units": 4, "kept_over_micro_batches": "on"},
}
FOUR = Kind(micro_batches=(4,), awaits="", clips=True)
COUNTS = (4, 4, 4, 2, 7, 1)
OVER_MICRO_BATCHES = {
    "other-numbers": replace(FOUR, micro_batches=COUNTS),
    "resharding-told": replace(FOUR, micro_batches=COUNTS, awaits="reshard"),
    "activation-checkpoints": replace(FOUR, checkpoints=True, compiles="blocks"),
    "offloaded-tied-and-frozen": replace(FOUR, offloads=True, tied=True, frozen=True),
    "frozen-for-a-while": replace(FOUR, freezes_from=4),
    "user-keeps": replace(FOUR, user_keeps=True),
    "own-hooks": replace(FOUR, hooks=True, param_dtype=torch.bfloat16),
    "own-reductions": replace(FOUR, reduces_from=0),
    "scaled-and-steps-left-out": replace(FOUR, scales=True, clips=False),
    "no-optimizer": replace(FOUR, between="no optimizer", clips=False),
    **{
        f"amid-{amid.replace(' ', '-')}": replace(FOUR, amid=amid)
        for amid in (
            *("evaluation", "error in backward", "checkpoint", "block alone"),
            *("weights written", "step", "clipped"),
        )
    },
}


@pytest.mark.parametrize("kind", _few(OVER_MICRO_BATCHES, "other-numbers"))
def test_what_is_kept_over_micro_batches(two_ranks: RankPool, kind: Kind) -> None:
    changes = KEPT_ON
    on = {"kept_over_micro_batches": "on"}
    if kind.reduces_from == 0:  # What cannot be merged then.
        changes = {1: {"kept_units": 3, **on}, 8: {"kept_units": 4, "prefetch": 1, **on}}
    if kind.user_keeps:
        changes = {1: on, 8: {}}
    if kind.between == "no optimizer":  # After 32 passes it is not waited for, and `on` is refused.
        changes = {step: KEPT_ON[step] for step in (1, 5, 9)}
    assert two_ranks.run(differs, kind, changes, 12) == ["", ""]


@pytest.mark.slow
def test_copies_of_a_model_that_is_kept_over_micro_batches(four_ranks: RankPool) -> None:
    for awaits in ("all-reduce", "gradient sync"):
        kind = replace(FOUR, replicas=2, micro_batches=COUNTS, awaits=awaits)
        assert four_ranks.run(differs, kind, KEPT_ON, 12) == [""] * 4


def _gathers(kind: Kind, change: dict[str, Any]) -> int:
    """How many times a unit is gathered in three steps."""
    model: Any = bagua_client.tune(sharded(kind))
    _, optimizer = train(model, kind, {1: change}, 3)
    gathered = tunable_of(model)._gather_begins
    counted = mock.Mock(side_effect=gathered)
    with mock.patch.object(tunable_of(model)._held.traffic, "gather_begins", counted):
        train(model, kind, {}, 6, optimizer, 3)
    return counted.call_count


@pytest.mark.slow
def test_it_is_gathered_once_in_a_step(two_ranks: RankPool) -> None:
    on = {"kept_over_micro_batches": "on", "channels": 2}
    told = replace(FOUR, awaits="gradient sync")
    # Five units; torch keeps the model's own from the forward pass to the backward pass.
    assert two_ranks.run(_gathers, FOUR, {"channels": 2}) == [3 * 4 * 9] * 2
    assert two_ranks.run(_gathers, told, on) == [3 * (4 * 8 + 1)] * 2
    assert two_ranks.run(_gathers, FOUR, {**on, "kept_units": 3}) == [3 * (4 * 2 + 4)] * 2
    assert two_ranks.run(_gathers, told, {**on, "kept_units": 4}) == [3 * 5] * 2


def what_is_offered(
    kind: Kind, knob: str = "kept_over_micro_batches", allowed: Sequence[str] = ()
) -> tuple[list[Any], str, str]:
    """What is tried of it after some steps, why not more, and why that cannot be had."""
    model: Any = bagua_client.tune(sharded(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, kind, {}, 1, optimizer)
    tunable = tunable_of(model)
    train(model, kind, {}, 5, optimizer, 1)
    assert tunable.order_is_agreed
    row = tunable.offer.table()[knob]
    return [*tunable.offer.values(allowed).get(knob, ["off"])], row.left_alone, row.cannot("on")


@pytest.mark.slow
def test_it_is_offered_where_a_step_has_several_and_no_weight_changes_unseen(
    two_ranks: RankPool,
) -> None:
    assert two_ranks.run(what_is_offered, Kind()) == [(["off"], "", "")] * 2
    assert two_ranks.run(what_is_offered, FOUR) == [(["off", "on"], "", "")] * 2
    written = replace(FOUR, amid="weights written")
    assert two_ranks.run(what_is_offered, written) == [(["off", "on"], "", "")] * 2
    values, why, cannot = two_ranks.run(what_is_offered, replace(FOUR, amid="data written"))[0]
    assert values == ["off"]
    assert "writes to weights' data between two micro-batches" in why
    assert cannot


DEFERRED: dict[int, dict[str, Any]] = {
    3: {"deferred_reduction": "on"},
    5: {"deferred_reduction": "on", "kept_units": 4, "kept_over_micro_batches": "on"},
    7: {"deferred_reduction": "on", "bucket_bytes": 700, "kept_units": 3},
    9: {"deferred_reduction": "on", "channels": 2, "scatter_group": "own"},
}
TOLD = replace(FOUR, tells="ours", micro_batches=(4, 4, 4, 4, 2, 7, 1, 3))
LEFT_TO_THE_LAST = {
    "told-to-us": TOLD,
    "told-to-torch-and-offloaded": replace(TOLD, tells="torch's", offloads=True),
    "tied-and-frozen": replace(
        TOLD, tied=True, frozen=True, checkpoints=True, param_dtype=torch.bfloat16
    ),
    "scaled": replace(TOLD, scales=True, clips=False),
    "amid-error": replace(TOLD, amid="error"),
    "amid-checkpoint": replace(TOLD, amid="checkpoint"),
}


@pytest.mark.parametrize("kind", _few(LEFT_TO_THE_LAST, "told-to-us"))
def test_what_is_left_to_the_last_micro_batch(two_ranks: RankPool, kind: Kind) -> None:
    """Beside a training that does so by torch's own call: sums are made in that order."""
    changes = DEFERRED
    if kind.amid == "error":  # Nothing can be merged then.
        changes = {step: {**change, "bucket_bytes": 360} for step, change in DEFERRED.items()}
    by_hand = replace(kind, awaits="gradient sync", awaits_from=3, tells="")
    assert two_ranks.run(differs, kind, changes, 12, by_hand) == ["", ""]


@pytest.mark.slow
def test_sums_over_copies_are_left_to_the_last_micro_batch(four_ranks: RankPool) -> None:
    kind = replace(TOLD, replicas=2)
    for way, awaits in (("copies", "all-reduce"), ("on", "gradient sync")):
        by_hand = replace(kind, awaits=awaits, awaits_from=3, tells="")
        changes = {3: {"deferred_reduction": way}, 6: {"deferred_reduction": way, "kept_units": 4}}
        assert four_ranks.run(differs, kind, changes, 12, by_hand) == [""] * 4


@pytest.mark.slow
@pytest.mark.parametrize("amid", ["thrown away", "zeroed"])
def test_unreduced_gradients_are_thrown_away_as_others(two_ranks: RankPool, amid: str) -> None:
    """All but the last one's are: nothing is summed up in another order."""
    kind = replace(TOLD, amid=amid, amid_from=6)
    changes = {6: DEFERRED[3], 8: DEFERRED[5]}
    assert two_ranks.run(differs, kind, changes, 12) == ["", ""]


@pytest.mark.slow
def test_what_is_deferred_is_offered_where_the_last_one_is_told(two_ranks: RankPool) -> None:
    def offered(kind: Kind, *allowed: str) -> tuple[list[Any], str]:
        one, other = two_ranks.run(what_is_offered, kind, "deferred_reduction", allowed)
        assert one == other
        return one[:2]

    assert offered(replace(TOLD, micro_batches=(1,))) == (["off"], "")
    for tells in ("ours", "torch's"):
        assert offered(replace(TOLD, tells=tells)) == (["off", "on"], "")
    assert "does not tell which micro-batch" in offered(FOUR)[1]
    assert "in one micro-batch of each step" in offered(replace(FOUR, awaits="gradient sync"))[1]
    assert "writes to gradients" in offered(replace(TOLD, amid="clipped"))[1]
    narrow = replace(TOLD, reduce_dtype=torch.bfloat16, param_dtype=torch.bfloat16)
    assert offered(narrow)[0] == ["off"]
    assert offered(narrow, "deferred_reduction")[0] == ["off", "on"]


def _odd_step(kind: Kind, change: dict[str, Any], odd: str) -> tuple[float, list[str]]:
    """How far weights are off after a step of four micro-batches that is told as one of more, or in
    which gradients are thrown away; and what was said."""
    found, lines = [], mock.Mock()
    with mock.patch.object(bagua_settings, "logger", lines):
        for changes in ({}, {3: change}):
            model: Any = bagua_client.tune(sharded(kind))
            _, optimizer = train(model, kind, changes, 6)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=odd == "scaled")
            for number in range(4):
                model.report_last_micro_batch(number == 3 and odd not in ("early", "scaled"))
                torch.manual_seed(dist.get_rank() + 2 * number)
                loss = model(torch.randn(5, WIDTH)).square().mean()
                if number == 2 and odd == "thrown away in a pass":
                    optimizer.zero_grad()
                scaler.scale(loss).backward()
                if number == 1 and odd == "thrown away":
                    optimizer.zero_grad()
                if number == 1 and odd == "one thrown away":
                    next(model.parameters()).grad = None
            scaler.step(optimizer)
            found.append(state_of(model))
    one, other = found
    said = [call.args[0] for call in lines.warning.call_args_list]
    return max((one[name] - other[name]).abs().max().item() for name in one), said


ODD = {
    "early": "the last micro-batch of its step was not told",
    "scaled": "the last micro-batch of its step was not told",
    "thrown away": "",
    "thrown away in a pass": "",
    "one thrown away": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
def test_a_step_has_the_gradients_that_came_whatever_was_told(
    two_ranks: RankPool, odd: str
) -> None:
    for off, lines in two_ranks.run(_odd_step, replace(TOLD, clips=False), DEFERRED[3], odd):
        assert off < 1e-5
        assert [ODD[odd] in line for line in lines] == [True] * bool(ODD[odd])


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["early", "scaled", "thrown away", "thrown away in a pass"])
def test_so_have_copies_that_sum_up_late(four_ranks: RankPool, odd: str) -> None:
    kind = replace(TOLD, replicas=2, clips=False)
    change = {"deferred_reduction": "copies"}
    for off, lines in four_ranks.run(_odd_step, kind, change, odd):
        assert off < 1e-5
        assert [ODD[odd] in line for line in lines] == [True] * bool(ODD[odd])


def _switched_amid() -> float:
    """How far gradients are off, by their largest, where each switch comes between two
    micro-batches."""
    models: list[Any] = [sharded(Kind()), bagua_client.tune(sharded(Kind()))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    ways = [DEFERRED[5], {}, DEFERRED[7], {"kept_units": 4}, DEFERRED[9], DEFERRED[3], {}]
    worst = 0.0
    for step in range(4 + len(ways)):
        for part in range(4):
            for model in models:
                torch.manual_seed(100 * step + 10 * part + dist.get_rank())
                if model is models[1]:
                    model.report_last_micro_batch(part == 3)
                model(torch.randn(5, WIDTH)).square().mean().backward()
            if step == 1:
                tunable_of(models[1])  # It looks at the steps from here on.
            if step >= 4 and part == 1:
                tunable = tunable_of(models[1])
                found = replace(tunable.default, **possible(ways[step - 4], tunable))
                assert models[1].reconfigure(found)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            expected = one.grad.to_local()
            off = (expected - other.grad.to_local()).abs().max() if expected.numel() else 0.0
            worst = max(worst, float(off))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


def test_a_switch_between_two_micro_batches_loses_no_gradient(two_ranks: RankPool) -> None:
    assert max(two_ranks.run(_switched_amid)) < 1e-6


# What ``fully_shard`` has since torch 2.15: gradients that are held and reduced otherwise, process
# groups, memory and endings of the training's own. Losses and weights stay those of an untouched
# model.


newer = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_manual_backward_finalization"), reason="torch before 2.15"
)

ROUGH = Kind(param_dtype=torch.bfloat16, reduce_dtype=None, clips=True)
NEWER_KINDS = {
    "gradients-as-weights": ROUGH,
    "exact-gain": replace(ROUGH, has="exact gain"),
    "any-gradient": Kind(has="any gradient"),
    "own-scatter-group": Kind(has="own scatter group"),
    "kept-storage": Kind(has="kept storage"),
}
BY_HAND = Kind(ends_itself=True)


@newer
@pytest.mark.parametrize(
    "kind", [*NEWER_KINDS.values(), BY_HAND], ids=[*NEWER_KINDS, "ended-by-hand"]
)
def test_newer_ways_to_train(two_ranks: RankPool, kind: Kind) -> None:
    assert two_ranks.run(differs, kind, SEQUENCE) == ["", ""]


@newer
@pytest.mark.slow
@pytest.mark.parametrize("kind", NEWER_KINDS.values(), ids=list(NEWER_KINDS))
def test_micro_batches(two_ranks: RankPool, kind: Kind) -> None:
    own = replace(kind, micro_batches=TOLD.micro_batches, clips=True)
    assert two_ranks.run(differs, replace(own, awaits=""), KEPT_ON, 12) == ["", ""]
    by_hand = replace(own, awaits_from=3)
    told = replace(own, awaits="", tells="ours")
    assert two_ranks.run(differs, told, DEFERRED, 12, by_hand) == ["", ""]


@newer
@pytest.mark.slow
@pytest.mark.parametrize("awaits", ["", "gradient sync"])
def test_passes_ended_by_hand(four_ranks: RankPool, awaits: str) -> None:
    kind = replace(BY_HAND, replicas=2, width=8, micro_batches=COUNTS, awaits=awaits, clips=True)
    assert four_ranks.run(differs, kind, KEPT_ON, 12) == [""] * 4


@newer
def test_nothing_waits_for_the_last_where_passes_are_ended_by_hand(two_ranks: RankPool) -> None:
    told = replace(BY_HAND, tells="torch's", micro_batches=(4,))
    for values, why, cannot in two_ranks.run(what_is_offered, told, "deferred_reduction"):
        assert values == ["off"]
        assert "itself ends each backward pass (set_manual_backward_finalization)" in why
        assert cannot
