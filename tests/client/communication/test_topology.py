"""Which ranks share a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.communication import topology
from bagua_client.communication.topology import (
    Place,
    Topology,
    discover,
    place_of,
    told_node,
    topology_of,
)
from tests.ranks import RankPool


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Up to 12 ranks on up to 5 nodes, neighbours not always on the same one."""
    node_of = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in nodes.values()))


@given(found=topologies())
def test_groups_across_take_every_rank_once_and_one_of_a_node(found: Topology) -> None:
    ranks = sorted(rank for node in found.nodes for rank in node)
    assert sorted(rank for group in found.across for rank in group) == ranks
    for group in found.across:
        for node in found.nodes:
            assert len(set(group) & set(node)) <= 1
    leaders = found.across[0]
    assert leaders == tuple(node[0] for node in found.nodes)


@pytest.mark.parametrize(
    ("nodes", "is_hierarchical", "is_uniform"),
    [
        (((0,),), False, True),
        (((0, 1, 2),), False, True),
        (((0,), (1,), (2,)), False, True),
        (((0, 1), (2, 3)), True, True),
        (((0, 1), (2,)), True, False),
    ],
)
def test_a_hierarchy_needs_several_nodes_and_several_ranks_on_one(
    nodes: tuple[tuple[int, ...], ...], is_hierarchical: bool, is_uniform: bool
) -> None:
    found = Topology(nodes)
    assert (found.is_hierarchical, found.is_uniform) == (is_hierarchical, is_uniform)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, None),
        ({"GROUP_RANK": "3", "NODE_RANK": "7"}, ("GROUP_RANK", 3)),
        ({"NODE_RANK": "7", "LOCAL_WORLD_SIZE": "2"}, ("NODE_RANK", 7)),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NODEID": "1"}, ("LOCAL_WORLD_SIZE=2", 2)),
        ({"GROUP_RANK": "", "LOCAL_WORLD_SIZE": "4"}, ("LOCAL_WORLD_SIZE=4", 1)),
        ({"LOCAL_WORLD_SIZE": "0"}, None),
        ({"GROUP_RANK": "x"}, None),
        ({"GROUP_RANK": "²"}, None),
        ({"SLURM_PROCID": "5", "SLURM_NODEID": "1"}, ("SLURM_NODEID", 1)),
        ({"SLURM_PROCID": "0", "SLURM_NODEID": "0"}, None),
        ({"SLURM_NODEID": "1"}, None),
    ],
)
def test_the_node_is_read_from_what_launchers_set(
    variables: dict[str, str], told: tuple[str, int] | None
) -> None:
    assert told_node(5, variables) == told


def _places(
    monkeypatch: pytest.MonkeyPatch, ranks: Sequence[tuple[str, dict[str, str]]]
) -> list[Place]:
    """Of ranks with these host names and variables."""
    places = []
    for rank, (host, variables) in enumerate(ranks):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        places.append(place_of(rank, variables))
    return places


TORCHRUN = [{"GROUP_RANK": node} for node in "0011"]
SRUN = [{"SLURM_PROCID": str(rank), "SLURM_NODEID": node} for rank, node in enumerate("0011")]
SBATCH = [{"SLURM_PROCID": "0", "SLURM_NODEID": "0"}] * 4
MPIRUN: list[dict[str, str]] = [{}] * 4
LAUNCHERS = ("GROUP_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NODEID")


@pytest.mark.parametrize(
    ("variables", "hosts", "nodes"),
    [
        pytest.param(TORCHRUN, "xxxx", ((0, 1), (2, 3)), id="torchrun, twice on one host"),
        pytest.param(TORCHRUN, "abcd", ((0, 1), (2, 3)), id="torchrun in containers"),
        pytest.param(MPIRUN, "xxyy", ((0, 1), (2, 3)), id="nothing told"),
        pytest.param(MPIRUN, "xyxy", ((0, 2), (1, 3)), id="ranks dealt out in turns"),
        pytest.param(MPIRUN, "xxxx", ((0, 1, 2, 3),), id="one host"),
        pytest.param(SRUN, "xxxx", ((0, 1), (2, 3)), id="srun"),
        pytest.param(SBATCH, "xxyy", ((0, 1), (2, 3)), id="mpirun in a batch script"),
        pytest.param(TORCHRUN[:2] + MPIRUN[2:], "xyxy", ((0, 2), (1, 3)), id="told to some"),
        pytest.param(TORCHRUN[:2] + SRUN[2:], "xyyx", ((0, 3), (1, 2)), id="told in two ways"),
        pytest.param(
            [{"LOCAL_WORLD_SIZE": size} for size in "1333"],
            "xyyy",
            ((0,), (1, 2, 3)),
            id="nodes of different sizes",
        ),
    ],
)
def test_nodes_are_what_all_ranks_are_told_alike_and_else_hosts(
    monkeypatch: pytest.MonkeyPatch,
    variables: list[dict[str, str]],
    hosts: str,
    nodes: tuple[tuple[int, ...], ...],
) -> None:
    places = _places(monkeypatch, list(zip(hosts, variables, strict=True)))
    assert topology_of(places) == Topology(nodes)


def test_machines_of_one_name_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And no rank needs to know when its machine booted."""
    places = []
    for boot in ("x", "y", "x"):
        (tmp_path / "boot").write_text(boot)
        monkeypatch.setattr(topology, "BOOT_ID", tmp_path / "boot")
        places.append(place_of(0, {}))
    assert topology_of(places) == Topology(((0, 2), (1,)))
    monkeypatch.setattr(topology, "BOOT_ID", tmp_path / "missing")
    assert topology_of([place_of(0, {}), place_of(1, {})]) == Topology(((0, 1),))


@given(host=st.text(), rank=st.integers(0, 2**40), node=st.integers(0, 10**40).map(str))
def test_a_place_fits_into_what_ranks_exchange(host: str, rank: int, node: str) -> None:
    with patch.object(socket, "gethostname", lambda: host):
        for variables in ({}, {"GROUP_RANK": node}):
            assert torch.tensor(place_of(rank, variables), dtype=torch.int64).min() >= 0


def _discovered(hosts: str, variables: Sequence[dict[str, str]]) -> list[Topology]:
    """As the pool's ranks are told, and as ranks that have these host names and variables."""
    group = dist.group.WORLD
    assert group is not None
    found = [discover(group, torch.device("cpu"))]
    rank = dist.get_rank()
    with (
        patch.dict(os.environ, {**dict.fromkeys(LAUNCHERS, ""), **variables[rank]}),
        patch.object(socket, "gethostname", lambda: hosts[rank]),
    ):
        return [*found, discover(group, torch.device("cpu"))]


def test_all_ranks_discover_the_same_nodes_and_hosts(four_ranks: RankPool) -> None:
    found = four_ranks.run(_discovered, "xyxy", TORCHRUN[:2] + MPIRUN[2:])
    assert found == [[Topology(((0, 1), (2, 3))), Topology(((0, 2), (1, 3)))]] * 4
