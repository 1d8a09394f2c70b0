"""Who is tuned: the ranks ask one another, and what is wrong on one turns it off on all."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.utils.checkpoint import checkpoint

import bagua_client
from bagua_client import DistributedDataParallel, Tuning, tune
from bagua_client.agent import admission, job, report
from bagua_client.agent.job import describe_job, name_of, nothing_to_try
from bagua_client.communication import agreement, communicator
from bagua_client.communication.communicator import NOBODY_ELSE
from bagua_client.environment import Environment
from bagua_client.integrations import distributed_data_parallel, sharded_model
from bagua_client.integrations.single_model import tunable_of
from bagua_client.torch_private import reducer as torchs
from tests.client.listening import logged
from tests.client.test_single import BLOCKS, WIDTH, Model, Training
from tests.ranks import RankPool
from tests.strangers import lay


@contextmanager
def _autotune(**variables: str) -> Iterator[list[str]]:
    """What the client says to everyone while it is on."""
    url = {"BAGUA_AUTOTUNE_URL": "http://127.0.0.1:9"}
    tuned = mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE": "1", **url, **variables})
    with tuned, logged() as lines:
        yield lines


def _trains(model: Any) -> bool:
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    return model.is_tuning if isinstance(model, DistributedDataParallel) else False


def _with_a_rank_that_is_not_tuned(is_stock: bool) -> tuple[bool, list[str]]:
    agreement.ANSWER_SECONDS = 3.0
    is_other = dist.get_rank() == 1
    with _autotune(BAGUA_AUTOTUNE=str(int(is_stock or not is_other))) as lines:
        kind = Stock if is_stock and is_other else DistributedDataParallel
        return _trains(kind(nn.Linear(4, 4))), lines


@pytest.mark.parametrize("is_stock", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_is_not_to_be_tuned_turns_it_off_for_all(
    two_ranks: RankPool, is_stock: bool
) -> None:
    (first, lines), (second, silent) = two_ranks.run(_with_a_rank_that_is_not_tuned, is_stock)
    assert (first, second, silent) == (False, False, [])
    (line,) = lines
    assert line.startswith("autotune is off: ")
    assert "not all ranks have BAGUA_AUTOTUNE=1" in line


def _of_another_release_on(rank: int) -> tuple[bool, list[str]]:
    other = mock.patch.object(report, "FORMAT", report.FORMAT + int(dist.get_rank() == rank))
    with _autotune() as lines, other:
        return _trains(DistributedDataParallel(nn.Linear(4, 4))), lines


@pytest.mark.slow
def test_ranks_of_different_releases_train_without_autotuning(three_ranks: RankPool) -> None:
    """Their reports differ in size, which gloo answers by ending the process."""
    results = three_ranks.run(_of_another_release_on, 2)
    assert [tunes for tunes, _ in results] == [False] * 3
    (line,) = [line for _, lines in results for line in lines]
    assert line.startswith("autotune is off")
    assert "rank 2 has another release of bagua-autotune" in line


def _with_no_interface_on(rank: int, hidden: bool) -> tuple[bool, list[str]]:
    """``hidden``: gloo only notices when the ranks connect."""
    wrong = {"GLOO_SOCKET_IFNAME": "nosuch0"} if dist.get_rank() == rank else {}
    look = (lambda: "") if hidden else admission._device_error
    with (
        _autotune(**wrong) as lines,
        mock.patch.object(admission, "_device_error", look),
        mock.patch.object(communicator, "CONNECT_SECONDS", 3.0),
    ):
        return _trains(DistributedDataParallel(nn.Linear(4, 4))), lines


@pytest.mark.parametrize(
    ("rank", "hidden"), [(0, False), pytest.param(1, True, marks=pytest.mark.slow)]
)
def test_a_rank_whose_gloo_has_no_interface_turns_it_off_for_all(
    two_ranks: RankPool, rank: int, hidden: bool
) -> None:
    results = two_ranks.run(_with_no_interface_on, rank, hidden)
    assert [tunes for tunes, _ in results] == [False, False]
    lines = [line for _, lines in results for line in lines]
    assert any(f"rank {rank} cannot make a gloo group" in line for line in lines)
    assert any("training goes on untuned" in line for line in lines)
    assert any("GLOO_SOCKET_IFNAME" in line for line in results[rank][1])


ARGUMENTS = inspect.signature(Stock.__init__).parameters
REFUSED = [
    (options, reason)
    for argument, options, reason in [
        (
            "skip_all_reduce_unused_params",
            {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
            "not every bucket is reduced",
        ),
        ("bucket_cap_mb_list", {"bucket_cap_mb_list": [1, 2]}, "already sets each bucket"),
    ]
    if argument in ARGUMENTS
]


def _refused(options: dict[str, Any]) -> tuple[bool, list[str]]:
    with _autotune() as lines:
        return _trains(DistributedDataParallel(nn.Linear(4, 4), **options)), lines


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_cannot_be_tuned_is_trained_and_said(
    two_ranks: RankPool, options: dict[str, Any], reason: str
) -> None:
    results = two_ranks.run(_refused, options)
    assert [tunes for tunes, _ in results] == [False, False]
    (line,) = [line for _, lines in results for line in lines]
    assert line.startswith("autotune is off: ")
    assert reason in line


def _unknown_device() -> str:
    ddp = Stock(nn.Linear(4, 4))
    ddp.device = torch.device("meta")
    from bagua_client.reducer.offer import refusal_of

    return refusal_of(ddp, torchs.caps_of(ddp))


def test_a_device_that_nobody_can_time_is_refused_in_words(two_ranks: RankPool) -> None:
    for sentence in two_ranks.run(_unknown_device):
        assert sentence == "steps on devices of type meta cannot be timed here"


def _tuned_by_tune() -> tuple[bool, list[str]]:
    with _autotune() as lines:
        return _trains(tune(Stock(nn.Linear(4, 4)))), lines


def test_a_wrapper_of_somebody_elses_is_admitted_as_ours_is(two_ranks: RankPool) -> None:
    for tunes, lines in two_ranks.run(_tuned_by_tune):
        assert tunes
        assert not any("autotune is off" in line for line in lines)


def _hook_in_mid_tuning(stateful: bool, steps_before: int) -> tuple[Tuning, list[str], bool]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    calls = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    with _autotune() as lines:
        model = DistributedDataParallel(nn.Linear(4, 4))
        assert steps_before == 0 or _trains(model)
        model.register_comm_hook(None, hook if stateful else default_hooks.allreduce_hook)
        for _ in range(40):
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.005)
        return model.tuning, lines, bool(calls)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_hook_of_the_users_ends_the_tuning_unless_it_is_known_to_bear_it(
    two_ranks: RankPool, steps_before: int
) -> None:
    results = two_ranks.run(_hook_in_mid_tuning, True, steps_before)
    for tuning, _, runs in results:
        assert (tuning.state, runs) == ("off", True)
        assert "hook _hook_in_mid_tuning.<locals>.hook may keep state" in tuning.reason
    (said,) = [line for _, lines, _ in results for line in lines]
    assert said == f"autotune is off: {tuning.reason}"
    results = two_ranks.run(_hook_in_mid_tuning, False, steps_before)
    assert [tuning.state for tuning, _, _ in results] == ["waiting"] * 2
    (said,) = [line for _, lines, _ in results for line in lines if "hook" in line]
    assert said == (
        "autotune leaves some settings alone: the training's communication hook allreduce_hook "
        "carries the buckets, so only their sizes are tuned"
    )


class _OwnCode(nn.Sequential):
    def forward(self, values: torch.Tensor) -> Any:
        for each in self:
            values = checkpoint(each, values, use_reentrant=False)
        return values


def _seen_in_the_first_steps(has_own_code: bool) -> list[str]:
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4)
    block = _OwnCode(*layers) if has_own_code else checkpoint_wrapper(nn.Sequential(*layers))
    with _autotune() as lines:
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), block))
        for _ in range(40):
            model(torch.ones(2, 4)).sum().backward()
            time.sleep(0.005)
        return [line for line in lines if "alone" in line]


@pytest.mark.parametrize(
    ("has_own_code", "why"), [(False, "blocks write buffers"), (True, "the model's own code")]
)
def test_what_the_first_steps_show_is_said(
    two_ranks: RankPool, has_own_code: bool, why: str
) -> None:
    (line,), nothing = two_ranks.run(_seen_in_the_first_steps, has_own_code)
    assert nothing == []
    assert line.startswith(f"autotune leaves some settings alone: recomputed blocks: {why}")


def _lists(algorithms: str, folder: str = "") -> list[str]:
    """What is said, with the packages of the folder."""
    path = mock.patch.object(sys, "path", [*sys.path, folder])
    with path, mock.patch.dict(os.environ, BAGUA_AUTOTUNE_ALLOW=algorithms), _autotune() as lines:
        DistributedDataParallel(nn.Linear(4, 4))
        return [line for line in lines if "alone" in line]


def test_what_is_listed_and_not_for_the_model_is_said(two_ranks: RankPool) -> None:
    said, nothing = two_ranks.run(_lists, "bytegrad,quantized,qadam")
    assert nothing == []
    assert said == [
        "autotune leaves some settings alone: algorithm quantized: it is for sharded models"
    ]
    assert two_ranks.run(_lists, "bytegrad") == [[], []]


def test_what_is_listed_and_cannot_be_imported_is_said(two_ranks: RankPool, tmp_path: Path) -> None:
    lay(tmp_path, {}, {"bagua_client.algorithms": {"broken": "lacking_package:Broken"}})
    (line,), nothing = two_ranks.run(_lists, "bytegrad,broken", str(tmp_path))
    assert nothing == []
    assert line == (
        "autotune leaves some settings alone: the algorithm 'broken' (lacking_package:Broken) "
        "cannot be imported: ModuleNotFoundError(\"No module named 'lacking_package'\")"
    )


def _hook_on_one_rank() -> tuple[str, str, list[str]]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    with _autotune() as lines:
        model = DistributedDataParallel(nn.Linear(4, 4))

        def own(state, bucket):  # type: ignore[no-untyped-def]
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

        hook = own if dist.get_rank() == 1 else default_hooks.allreduce_hook
        model.register_comm_hook(None, hook)
        for _ in range(20):
            model(torch.ones(2, 4)).sum().backward()
        return model.tuning.state, model.tuning.reason, lines


def test_a_hook_that_one_rank_alone_cannot_tune_with_ends_the_tuning_on_all(
    two_ranks: RankPool,
) -> None:
    results = two_ranks.run(_hook_on_one_rank)
    for state, reason, _ in results:
        assert state == "failed"
        assert reason == "nothing can be tuned on rank 1; see the log of that rank"
    assert any(line.startswith("autotune is off: ") for line in results[1][2])


@pytest.mark.parametrize(
    ("ranks", "position", "name"),
    [
        (range(4096), 1, "gpt"),
        (range(4096), 2, "gpt#2"),
        ([3], 1, "gpt@3"),
        ([0, 1], 1, "gpt@0-1"),
        ([4, 5, 6, 7], 3, "gpt@4-7#3"),
        ([1, 3], 1, "gpt@1,3"),
        (range(2, 130, 8), 1, "gpt@2-122:8"),
        ([0, 1, 4, 5], 1, "gpt@0,1,4,5"),
    ],
)
def test_a_model_on_some_of_the_ranks_is_a_job_with_their_name(
    ranks: Sequence[int], position: int, name: str
) -> None:
    assert name_of(Environment(job="gpt"), "Linear", ranks, position, 4096) == name


def test_no_two_sets_of_ranks_have_one_name() -> None:
    places = [[*range(0, 1024, 3), last] for last in (2000, 2001)]
    places += [[*range(0, 1024, 3), 1500, 2001], [0, 2001]]
    names = {name_of(Environment(job="long" * 60), "Linear", ranks, 1, 4096) for ranks in places}
    assert len(names) == len(places)
    assert all(len(name) <= 190 for name in names)


REASON = f"{NOBODY_ELSE}; {job.NO_BLOCKS}"
ALLOWED = frozenset({"bytegrad", "bf16"})


def _wrapped(recomputes: bool) -> tuple[str, str, Any]:
    """Why nothing is tried of a wrapper of one rank, at first and once its steps are known, and
    what a job would be registered with."""
    ours: Any = bagua_client.tune(Stock(Model(recomputes)))
    tunable = distributed_data_parallel.tunable_of(ours)
    first = nothing_to_try(tunable, ALLOWED)
    tunable.attach()
    Training(ours).run(5)
    found = describe_job(tunable, Environment(), "alone")
    return first, nothing_to_try(tunable, ALLOWED), found["knobs"]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_wrapper_of_one_rank_offers_no_buckets(one_rank: RankPool, recomputes: bool) -> None:
    ((first, later, knobs),) = one_rank.run(_wrapped, recomputes)
    said = "" if recomputes else REASON
    assert (first, later) == (said, said)
    assert list(knobs) == (["recomputed_blocks"] if recomputes else [])


def test_a_single_process_describes_itself_by_its_parameters() -> None:
    ours: Any = bagua_client.tune(Model())
    training = Training(ours)
    training.run(2)
    assert ours.reconfigure(bagua_client.Configuration())
    training.run(4)
    found = describe_job(tunable_of(ours), Environment(), "alone")
    values = found["knobs"]["recomputed_blocks"]["values"]
    assert (values[0], min(values)) == (BLOCKS, 0)
    assert found["default_configuration"] == {"recomputed_blocks": BLOCKS}
    assert (found["world_size"], found["ranks_per_node"]) == (1, [1])
    assert {each["name"] for each in found["tensors"]} == {n for n, _ in ours.named_parameters()}
    assert "backend" not in found["software"]


def test_a_model_with_nothing_to_try_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    monkeypatch.setattr(job, "describe_job", None)
    ours: Any = bagua_client.tune(nn.Linear(WIDTH, 1))
    ours(torch.ones(1, WIDTH)).sum().backward()
    assert ours.tuning.state == "off"
    assert ours.tuning.reason == REASON
    assert not ours._forward_hooks
    assert not ours._forward_pre_hooks


def _sharded() -> tuple[str, list[float], list[float]]:
    """What a sharded model of one rank is tuned as, and its losses beside an untouched one's."""
    found = []
    for is_ours in (False, True):
        model: Any = Model()
        for block in model.blocks:
            fully_shard(block)
        model = fully_shard(model)
        ours = bagua_client.tune(model) if is_ours else model
        found.append(Training(ours).run(7, {1: BLOCKS, 4: 1, 6: 0} if is_ours else {}))
    return type(sharded_model.tunable_of(ours)).__name__, *found


def test_what_fully_shard_leaves_on_one_rank_is_changed_as_well(one_rank: RankPool) -> None:
    ((kind, untouched, changed),) = one_rank.run(_sharded)
    assert kind == "TunableSingle"
    assert changed == untouched
