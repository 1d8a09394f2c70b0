"""Which ranks share a node."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.communication.topology import Topology, discover, node_rank
from tests.ranks import RankPool


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Up to 12 ranks on up to 5 nodes, neighbours not always on the same one."""
    node_of = draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        nodes.setdefault(node, []).append(rank)
    return Topology(tuple(tuple(ranks) for ranks in nodes.values()))


@given(topology=topologies())
def test_groups_across_take_every_rank_once_and_one_of_a_node(topology: Topology) -> None:
    ranks = sorted(rank for node in topology.nodes for rank in node)
    assert sorted(rank for group in topology.across for rank in group) == ranks
    for group in topology.across:
        for node in topology.nodes:
            assert len(set(group) & set(node)) <= 1
    leaders = topology.across[0]
    assert leaders == tuple(node[0] for node in topology.nodes)


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
    topology = Topology(nodes)
    assert (topology.is_hierarchical, topology.is_uniform) == (is_hierarchical, is_uniform)


@pytest.mark.parametrize(
    ("variables", "node"),
    [
        ({}, 0),
        ({"GROUP_RANK": "3", "NODE_RANK": "7"}, 3),
        ({"NODE_RANK": "7"}, 7),
        ({"RANK": "5", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"GROUP_RANK": "", "RANK": "5", "LOCAL_WORLD_SIZE": "4"}, 1),
        ({"RANK": "5", "LOCAL_WORLD_SIZE": "0"}, 0),
        ({"GROUP_RANK": "x"}, 0),
    ],
)
def test_the_node_is_read_from_what_launchers_set(variables: dict[str, str], node: int) -> None:
    assert node_rank(variables) == node


def _discovered() -> Topology:
    group = dist.group.WORLD
    assert group is not None
    return discover(group, torch.device("cpu"))


def test_all_ranks_discover_the_same_nodes(four_ranks: RankPool, three_ranks: RankPool) -> None:
    assert four_ranks.run(_discovered) == [Topology(((0, 1), (2, 3)))] * 4
    assert three_ranks.run(_discovered) == [Topology(((0, 1), (2,)))] * 3
