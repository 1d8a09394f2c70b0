"""What a rank sees around its training, and what the ranks tell each other of it."""

from __future__ import annotations

import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua_client import DistributedDataParallel
from bagua_client.checking import surroundings
from bagua_client.checking.surroundings import (
    Surroundings,
    active_ports,
    gather,
    gloo_over_infiniband,
    nccl_network,
)
from bagua_client.integrations.distributed_data_parallel import tunable_of
from tests.client.listening import EachStep
from tests.ranks import RankPool


def port(folder: Path, device: str, state: str, link: str) -> str:
    """One made-up port of a device, as the kernel shows it; returns the file of its state."""
    place = folder / device / "ports" / "1"
    place.mkdir(parents=True)
    (place / "state").write_text(f"{state}\n")
    (place / "link_layer").write_text(f"{link}\n")
    return str(place / "state")


def test_only_active_ports_of_infiniband_count(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "1: DOWN", "InfiniBand")
    active = port(tmp_path, "mlx5_1", "4: ACTIVE", "InfiniBand")
    port(tmp_path, "mlx5_2", "4: ACTIVE", "Ethernet")
    assert active_ports(tmp_path) == [active]
    assert active_ports(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("names", "is_so"), [("ib0", True), ("ib0,eth0", False), ("eth0", False), ("", False)]
)
def test_gloo_may_use_ip_over_infiniband(tmp_path: Path, names: str, is_so: bool) -> None:
    for name, kind in (("ib0", "32"), ("eth0", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
    assert gloo_over_infiniband({"GLOO_SOCKET_IFNAME": names}, tmp_path) == is_so


def test_nccl_says_in_its_log_what_it_uses(tmp_path: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    log = tmp_path / f"nccl.{host}.{os.getpid()}"
    environment = {"NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p")}
    assert nccl_network(environment) == ""
    log.write_text("a:1:2 [0] NCCL INFO Bootstrap: Using eth0\n")
    assert nccl_network(environment) == ""
    log.write_text("a:1:2 [0] NCCL INFO NET/IB : No device found.\na:1:2 [0] NCCL INFO Using "
                   "network Socket\n")  # fmt: skip
    assert nccl_network(environment) == "Socket"
    assert nccl_network({}) == ""


def _with_ports(folder: Path) -> Any:
    with mock.patch.object(surroundings, "INFINIBAND", folder / str(dist.get_rank())):
        model = DistributedDataParallel(nn.Linear(2, 2))
        return gather(Surroundings(tunable_of(model), model).look(), tunable_of(model).communicator)


def test_each_rank_tells_the_ports_of_its_own_machine(two_ranks: RankPool, tmp_path: Path) -> None:
    active = port(tmp_path / "1", "mlx5_0", "4: ACTIVE", "InfiniBand")
    first, second = two_ranks.run(_with_ports, tmp_path)[0]
    assert (first["ranks"], first["infiniband"]) == ([0], [])
    assert (second["ranks"], second["infiniband"]) == ([1], [active])


class Branches(nn.Module):
    """Two layers, of which a pass may leave the second one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def _passes(looks: bool, steps: list[list[bool]]) -> Any:
    """What rank 0 hears of all ranks after these steps, each of some passes, of which only the
    last communicates; False: rank 1 leaves the second layer out."""
    torch._dynamo.utils.counters.clear()  # These ranks serve other tests, too.
    model = DistributedDataParallel(Branches(), find_unused_parameters=looks)
    tunable = tunable_of(model)
    seen = Surroundings(tunable, model)
    tunable.report_to(EachStep(seen.reduced))
    tunable.attach()
    for passes in steps:
        for i, both in enumerate(passes):
            is_last = i == len(passes) - 1
            with nullcontext() if is_last else model.no_sync():
                model(torch.ones(2, 8), both or dist.get_rank() == 0).sum().backward()
    return gather(seen.look(), tunable.communicator)


@pytest.mark.parametrize(
    ("steps", "without_all"),
    [
        ([[True]] * 4, 0),
        ([[True], [False], [False], [True]], 2),
        ([[False, True]] * 3, 0),
        # The passes together reach all, but the one that communicates does not.
        ([[True, False]] * 3, 3),
    ],
)
def test_passes_that_leave_parameters_out_are_counted_on_each_rank(
    two_ranks: RankPool, steps: list[list[bool]], without_all: int
) -> None:
    seen = two_ranks.run(_passes, True, steps)[0]
    by_rank = {rank: each for each in seen for rank in each["ranks"]}
    assert sorted(by_rank) == [0, 1]
    assert len(seen) == (2 if without_all else 1)
    assert by_rank[0]["passes"] == by_rank[1]["passes"] == len(steps)
    assert by_rank[0]["passes_without_all"] == 0
    assert by_rank[1]["passes_without_all"] == without_all


def test_nothing_is_counted_where_torch_does_not_search(two_ranks: RankPool) -> None:
    [seen] = two_ranks.run(_passes, False, [[True]] * 2)[0]
    assert seen["ranks"] == [0, 1]
    assert not {"passes", "splits_at_buckets", "compiled_before"} & set(seen)
    assert (seen["device"], seen["backend"]) == ("cpu", "gloo")


def _changed() -> Any:
    """What is seen if rank 1 sets a variable before, and rank 0 another one after wrapping."""
    rank = dist.get_rank()
    try:
        if rank == 1:
            os.environ["NCCL_NET"] = "Socket"
        model = DistributedDataParallel(nn.Linear(2, 2))
        tunable = tunable_of(model)
        seen = Surroundings(tunable, model)
        if rank == 0:
            os.environ["NCCL_IB_DISABLE"] = "1"
        return gather(seen.look(), tunable.communicator)
    finally:
        os.environ.pop("NCCL_NET", None)
        os.environ.pop("NCCL_IB_DISABLE", None)


def test_variables_are_those_of_each_rank_when_it_wraps_and_later(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_changed)[0]
    assert (first["ranks"], second["ranks"]) == ([0], [1])
    assert (first["variables"], first["variables_later"]) == ({}, {"NCCL_IB_DISABLE": "1"})
    assert second["variables"] == second["variables_later"] == {"NCCL_NET": "Socket"}


def _compiled(order: str, splits: bool) -> tuple[Any, int]:
    """What is seen of a compiled module, and into how many graphs it was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs: list[Any] = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    module: nn.Module = torch.compile(layers, backend=backend)
    inputs = torch.ones(2, 512)
    with torch._dynamo.config.patch(optimize_ddp=splits):
        if order == "before":
            module(inputs).sum().backward()
        ddp = DistributedDataParallel(module, bucket_cap_mb=1)
        tunable = tunable_of(ddp)
        seen = Surroundings(tunable, ddp)
        for _ in range(3):
            ddp(inputs).sum().backward()
        return json.loads(seen.look()), len(graphs)


@pytest.mark.parametrize(
    ("order", "splits", "told"),
    [
        ("after", True, (True, False)),
        ("after", False, (False, False)),
        ("before", True, (True, True)),
    ],
)
def test_it_is_seen_whether_a_compiled_module_is_split_where_buckets_end(
    two_ranks: RankPool, order: str, splits: bool, told: tuple[bool, bool]
) -> None:
    for seen, graphs in two_ranks.run(_compiled, order, splits):
        assert (seen["splits_at_buckets"], seen["compiled_before"]) == told
        assert (graphs > 1) == (told == (True, False))
