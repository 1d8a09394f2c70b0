"""Process groups: their timeout, their ranks, and the chains of operations on them."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.agent.job import describe_job
from bagua_client.communication import process_groups
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import AllReduce
from bagua_client.communication.pipeline import ThreadPipeline
from bagua_client.environment import Environment
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.reducer.offer import ReplicatedOffer
from bagua_client.torch_private import groups as torch_groups
from bagua_client.torch_private.reducer import Caps
from tests.ranks import RankPool

CPU = torch.device("cpu")


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _timeouts() -> list[timedelta | None]:
    user = dist.new_group(timeout=timedelta(seconds=41))
    partition = [[rank] for rank in range(dist.get_world_size())]
    made = Communicator(user, CPU).new_group(partition)
    return [torch_groups.timeout_of(user, CPU), torch_groups.timeout_of(made, CPU)]


def test_a_new_group_has_the_timeout_of_the_users(two_ranks: RankPool) -> None:
    assert two_ranks.run(_timeouts) == [[timedelta(seconds=41)] * 2] * 2


def _sum(hierarchical: str) -> tuple[list[str], bool]:
    communicator = Communicator(_world(), CPU)
    configuration = Configuration(hierarchical=hierarchical)
    communicator.prepare(configuration)
    operations = communicator.sum_operations(configuration, channel=0)
    are_right = all(_sums(communicator, configuration, elements) for elements in (1, 2, 7, 1000))
    return [type(operation).__name__ for operation in operations], are_right


def _sums(communicator: Communicator, configuration: Configuration, elements: int = 3) -> bool:
    """Whether nine flat tensors, sent over the channels in turn, all come back as sums."""
    multiple = communicator.padding_multiple(configuration)
    padded = -(-elements // multiple) * multiple
    base = torch.arange(padded, dtype=torch.float32)
    flats = [(base + number) * (communicator.rank + 1) for number in range(9)]
    pipelines = [ThreadPipeline() for _ in range(configuration.channels)]
    completions = []
    for number, flat in enumerate(flats):
        channel = number % configuration.channels
        operations = communicator.sum_operations(configuration, channel)
        completions.append(pipelines[channel].start(flat, operations))
    for completion in completions:
        completion.wait()
    for pipeline in pipelines:
        pipeline.close()
    factor = sum(rank + 1 for rank in range(communicator.world_size))
    return all(torch.equal(flat, (base + n) * factor) for n, flat in enumerate(flats))


LEADER = ["Reduce", "AllReduce", "Broadcast"]
MEMBER = ["Reduce", "Broadcast"]
SHARDS = ["ReduceScatter", "OnShard", "AllGatherShards"]


@pytest.mark.parametrize(
    ("pool", "hierarchical", "operations"),
    [
        ("two_ranks", "leaders", [["AllReduce"]] * 2),
        ("two_ranks", "shards", [["AllReduce"]] * 2),
        ("three_ranks", "off", [["AllReduce"]] * 3),
        ("three_ranks", "leaders", [LEADER, MEMBER, LEADER]),
        ("three_ranks", "shards", [LEADER, MEMBER, LEADER]),
        ("four_ranks", "leaders", [LEADER, MEMBER, LEADER, MEMBER]),
        ("four_ranks", "shards", [SHARDS] * 4),
    ],
)
def test_every_chain_leaves_the_sum_on_every_rank(
    request: pytest.FixtureRequest, pool: str, hierarchical: str, operations: list[list[str]]
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    assert ranks.run(_sum, hierarchical) == [(names, True) for names in operations]


def _groups_held() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _rounds_of_tuning(ranks: list[int]) -> list[tuple[int, bool]]:
    """For each configuration the groups that are there for it, and whether its sums are right."""
    user = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return []
    communicator = Communicator(user, CPU)
    before = _groups_held()
    seen = []
    for keep in (Configuration(), Configuration(channels=2), Configuration(1, "leaders", 2)):
        for tried in (
            Configuration(channels=2),
            Configuration(1, "leaders"),
            Configuration(1, "shards", 4),
            Configuration(channels=4),
        ):
            communicator.prepare(tried)
            assert _sums(communicator, tried)
        dist.barrier(user)
        communicator.release(keep)
        seen.append((_groups_held() - before, _sums(communicator, keep)))
    return seen


@pytest.mark.parametrize(
    ("pool", "ranks", "groups"),
    [
        # The group of the user is the first channel; each channel by node takes three.
        ("four_ranks", [0, 1, 2, 3], [0, 1, 6]),
        ("four_ranks", [0, 2, 3], [0, 1, 6]),
        ("two_ranks", [0, 1], [0, 1, 1]),
    ],
)
def test_groups_are_let_go_and_made_again(
    request: pytest.FixtureRequest, pool: str, ranks: list[int], groups: list[int]
) -> None:
    results = request.getfixturevalue(pool).run(_rounds_of_tuning, ranks)
    for rank, seen in enumerate(results):
        assert seen == ([(held, True) for held in groups] if rank in ranks else [])


def _backends_of_channels() -> list[str]:
    user = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(_world()) != dist.get_backend(user)
    communicator = Communicator(user, CPU)
    communicator.prepare(Configuration(channels=4))
    chains = [communicator.sum_operations(Configuration(channels=4), i) for i in range(4)]
    groups = {chain[0].group for chain in chains if isinstance(chain[0], AllReduce)}
    assert len(groups) == 4
    return sorted(str(dist.get_backend(group)) for group in groups)


def test_the_channels_of_a_group_have_its_backend(two_ranks: RankPool) -> None:
    assert two_ranks.run(_backends_of_channels) == [["cpu:gloo"] * 4] * 2


def _groups_of_a_sub_group() -> list[float]:
    """Rank 1 is in a group more than rank 2 when both make one; who makes it is their own."""
    dist.new_group([0, 1])
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    communicator = Communicator(pair, CPU)
    values = []
    for _ in range(2):
        value = torch.ones(1)
        dist.all_reduce(value, group=communicator.new_group([[0, 1]]))
        values.append(value.item())
    return values


def test_ranks_in_different_numbers_of_groups_can_make_one(three_ranks: RankPool) -> None:
    assert three_ranks.run(_groups_of_a_sub_group) == [[], [2.0, 2.0], [2.0, 2.0]]


BOUND = torch.device("cuda", 0)


def _without_groups() -> list[str]:
    """On a sub group whose backend might split all ranks' group for a new one."""
    user = dist.new_group([0, 1, 2], backend="cpu:gloo")
    if dist.get_rank() == 3:
        return []
    model = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=user)
    assert model.reconfigure(model.configuration)
    tunable = tunable_of(model)
    offered = [describe_job(tunable, Environment(), "job")["knobs"]]
    messages = []
    _world().bound_device_id = BOUND
    try:
        offered.append(describe_job(tunable, Environment(), "job")["knobs"])
        for configuration in (Configuration(channels=2), Configuration(1, "leaders")):
            with pytest.raises(RuntimeError) as caught:
                model.reconfigure(configuration)
            messages.append(str(caught.value))
        assert model.configuration == tunable.default
        assert model.reconfigure(Configuration(9))
        model(torch.ones(1, 3)).sum().backward()
    finally:
        _world().bound_device_id = None
    return [
        *messages,
        *(str(knobs[name]["values"]) for knobs in offered for name in ("channels", "hierarchical")),
    ]


def test_where_no_groups_can_be_made_none_are_offered_and_those_asked_for_are_an_error(
    four_ranks: RankPool,
) -> None:
    *inside, outside = four_ranks.run(_without_groups)
    assert outside == []
    for rank, (channels, leaders, *values) in enumerate(inside):
        assert values == ["[1, 2, 4, 8, 16]", "['off', 'leaders']", "[1]", "['off']"]
        for message in (channels, leaders):
            assert f"rank {rank} cannot make" in message
            assert "3 of the job's 4 ranks" in message
            assert "Leave device_id out" in message


def _held() -> tuple[int, int, int]:
    """Process groups, descriptors and threads of this process."""
    gc.collect()
    processes = Path("/proc/self")
    return (
        _groups_held(),
        len(list((processes / "fd").iterdir())),
        len(list((processes / "task").iterdir())),
    )


def _dropped_wrappers(ranks: list[int], wrappers: int) -> list[tuple[int, int, int]]:
    """What is held after each; rank 0 drops every other one late."""
    user = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return []
    held, late = [], []
    os.environ.update(BAGUA_AUTOTUNE="1", BAGUA_AUTOTUNE_URL="http://127.0.0.1:9")
    try:
        for number in range(wrappers):
            model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=user)
            assert model.is_tuning
            tunable = tunable_of(model)
            layout = tunable.plan(Configuration(1, channels=2))
            tunable.prepare(layout)
            tunable.schedule(layout)
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
            late = [model] if number % 2 and dist.get_rank() == ranks[0] else []
            del model, tunable
            held.append(_held())
    finally:
        del os.environ["BAGUA_AUTOTUNE"], os.environ["BAGUA_AUTOTUNE_URL"], late
    return held


@pytest.mark.slow
def test_what_dropped_wrappers_leave_does_not_grow(three_ranks: RankPool) -> None:
    """Their process groups are used again."""
    for held in three_ranks.run(_dropped_wrappers, [0, 1], 14)[:2]:
        groups, descriptors, threads = zip(*held, strict=True)
        assert max(groups[5:]) == max(groups[:5])
        # The fewest of the last: the thread that looks for the service has a socket at times.
        assert min(descriptors[-4:]) <= max(descriptors[:7])
        assert min(threads[-4:]) <= max(threads[:7])


def _offer(**issued: int) -> list[int]:
    births = [int(name[1:]) for name in issued]
    rest = [process_groups.NONE] * (process_groups.OFFERED - len(births))
    return [*births, *rest, *issued.values(), *rest]


@pytest.mark.parametrize(
    ("offers", "birth"),
    [
        ([_offer(), _offer(), _offer()], None),
        ([_offer(b3=5), _offer(b3=5), _offer(b3=0)], 3),
        ([_offer(b3=5), _offer(b3=6), _offer(b3=0)], None),  # would meet the wrong operation
        ([_offer(b3=5), _offer(b3=5), _offer()], None),  # not dropped on all ranks yet
        ([_offer(b3=5, b7=1), _offer(b7=1), _offer(b3=0, b7=2)], 7),
        ([_offer(b3=-1), _offer(b3=-1), _offer(b3=-1)], None),  # not known
    ],
)
def test_groups_are_used_again_where_their_ranks_are_at_the_same_operation(
    offers: list[list[int]], birth: int | None
) -> None:
    assert process_groups.choose_spare(offers, [[0, 1], [2]]) == birth


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("multiprocessors", [1, 8, 20, 40, 58, 80, 108, 132, 148])
def test_the_groups_in_use_at_once_fit_a_gpu(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "_multiprocessors", lambda device: multiprocessors)
    channels = process_groups.most_channels(GPU)
    assert channels in (1, 2, 4, 8, 16)
    assert (
        channels == 1
        or 3 * channels * process_groups.most_blocks(GPU, by_node=True) <= multiprocessors
    )
    others = multiprocessors - (channels - 1) * process_groups.most_blocks(GPU, by_node=False)
    assert others >= multiprocessors // 2  # are left to the user's own group


def _offered_channels() -> list[object]:
    """Of GPUs of one host, and of CPUs."""
    found = []
    for device in (CPU, GPU):
        communicator = Communicator(_world(), CPU)
        communicator.device = device
        offer = ReplicatedOffer(
            default=Configuration(),
            communicator=communicator,
            default_caps=Caps(1, 1),
            tensors=(),
            in_ready_order=True,
            hook=None,
        )
        found += [offer.values()["channels"], len(offer.reasons())]
    return found


def test_between_the_gpus_of_one_host_there_is_one_channel(two_ranks: RankPool) -> None:
    for every, no_reason, one, reason in two_ranks.run(_offered_channels):
        assert every == [1, 2, 4, 8, 16]
        assert one == [1]
        assert reason == no_reason + 1


@pytest.mark.parametrize(
    ("off", "is_one"),
    [((), True), (("P2P",), True), (("SHM",), True), (("P2P", "SHM"), False)],
)
def test_ranks_of_one_host_whose_nccl_goes_through_the_network_have_several_channels(
    off: Sequence[str], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in ("P2P", "SHM"):
        monkeypatch.setenv(f"NCCL_{way}_DISABLE", "1" if way in off else "0")
    assert bool(process_groups.why_one_channel(GPU, nodes=1)) == is_one
    assert not process_groups.why_one_channel(GPU, nodes=2)
    assert not process_groups.why_one_channel(CPU, nodes=1)
