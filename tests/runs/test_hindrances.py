"""Which warnings ``check`` gives, by what the ranks of a job have seen."""

from __future__ import annotations

from typing import Any

import pytest

from bagua_client.checking.surroundings import WATCHED
from bagua_runs.hindrances import NAMED_RANKS, RULES, hindrances

pytestmark = pytest.mark.slow

PORT = "/sys/class/infiniband/mlx5_0/ports/1/state"
ALL = "(all ranks)"
WHEN = "in the environment when the model was wrapped"
ON_NCCL = {"device": "cuda", "backend": "nccl"}
UNUSED, COMPILED = "a search for unused parameters that finds none", "compiled graphs that do not"
INFINIBAND = "InfiniBand that is not used"


def seen(ranks: list[int], **others: Any) -> dict[str, Any]:
    """What ranks see where nothing is wrong: on CPUs, unless ``others`` say something else."""
    nothing = {
        "device": "cpu",
        "backend": "gloo",
        "debug_level": "OFF",
        "variables": {},
        "variables_later": {},
        "infiniband": [],
        "gloo_over_infiniband": False,
        "nccl_network": "",
    }
    return {"ranks": ranks, **nothing, **others}


def found(*all_seen: dict[str, Any], ranks: int = 4, nodes: int = 2) -> list[tuple[str, str]]:
    """The names of what is found, and where it was seen."""
    facts = {"ranks": ranks, "nodes": nodes, "seen": list(all_seen)}
    return [(each.name, each.seen) for each in hindrances(facts)]


def by_all(nodes: int = 2, **others: Any) -> list[tuple[str, str]]:
    return found(seen([0, 1, 2, 3], **others), nodes=nodes)


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "one work queue to the GPU"),
        ("CUDA_LAUNCH_BLOCKING", "1", "kernels that are launched one by one"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "waits that block the process"),
        ("NCCL_BLOCKING_WAIT", "true", "waits that block the process"),
        ("NCCL_LAUNCH_MODE", "GROUP", "NCCL's launches in a group"),
        ("NCCL_P2P_DISABLE", "1", "GPUs of a node that do not reach each other directly"),
        ("NCCL_SHM_DISABLE", "1", "no shared memory between the processes of a node"),
    ],
)
def test_a_variable_is_told_with_its_value_and_only_where_it_matters(
    name: str, text: str, rule: str
) -> None:
    assert by_all(**ON_NCCL, variables={name: text}) == [(rule, f"{name}={text} {WHEN} {ALL}")]
    # NCCL and CUDA are not in this job.
    assert by_all(variables={name: text}) == []
    off = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "NCCL_LAUNCH_MODE": "PARALLEL"}.get(name, "0")
    assert by_all(**ON_NCCL, variables={name: off}) == []


def test_a_variable_that_comes_later_is_told_as_such() -> None:
    later = {"CUDA_LAUNCH_BLOCKING": "1"}
    [(_, where)] = by_all(**ON_NCCL, variables_later=later)
    assert where == (
        "CUDA_LAUNCH_BLOCKING=1 in the environment only later, so it may not be in force "
        "(all ranks)"
    )
    # What was in force when the model was wrapped still is, whatever became of the variable.
    [(_, where)] = by_all(**ON_NCCL, variables=later)
    assert where == f"CUDA_LAUNCH_BLOCKING=1 {WHEN} {ALL}"


def test_the_ranks_are_named_but_not_all_of_many() -> None:
    wrong, right = {"CUDA_LAUNCH_BLOCKING": "1"}, dict[str, str]()
    some = seen([3, 1], **ON_NCCL, variables=wrong), seen([0, 2], **ON_NCCL, variables=right)
    [(_, where)] = found(*some)
    assert where.endswith("(rank 1, 3)")
    many = list(range(1, NAMED_RANKS + 3))
    both = seen(many, **ON_NCCL, variables=wrong), seen([0], **ON_NCCL, variables=right)
    [(_, where)] = found(*both, ranks=len(many) + 1)
    assert where.endswith("(rank 1, 2, 3, 4 and 2 more)")


def test_what_only_goes_on_inside_a_node_needs_several_ranks_there() -> None:
    variables = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    assert len(by_all(nodes=2, **ON_NCCL, variables=variables)) == 2
    assert by_all(nodes=4, **ON_NCCL, variables=variables) == []


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({}, "the backend is gloo"),
        ({**ON_NCCL, "variables": {"NCCL_IB_DISABLE": "1"}}, "NCCL_IB_DISABLE=1 in the environ"),
        ({**ON_NCCL, "variables": {"NCCL_NET": "Socket"}}, "NCCL_NET=Socket in the environment"),
        ({**ON_NCCL, "nccl_network": "Socket"}, 'NCCL\'s log says "Using network Socket"'),
        ({"gloo_over_infiniband": True}, ""),
        ({**ON_NCCL}, ""),
        ({**ON_NCCL, "variables": {"NCCL_IB_DISABLE": "0"}}, ""),
        # What NCCL says of itself counts more than a variable.
        ({**ON_NCCL, "variables": {"NCCL_NET": "Socket"}, "nccl_network": "IB"}, ""),
        ({"backend": "mpi"}, ""),
    ],
)
def test_sockets_beside_an_active_infiniband_port_are_told(
    others: dict[str, Any], why: str
) -> None:
    told = by_all(infiniband=[PORT], **others)
    if not why:
        assert told == []
        return
    [(name, where)] = told
    assert name == INFINIBAND
    assert where.startswith(why)
    assert where.endswith(f", and {PORT} is ACTIVE {ALL}")
    assert by_all(**others) == []
    assert by_all(nodes=1, infiniband=[PORT], **others) == []


def test_a_search_for_unused_parameters_is_in_vain_only_if_no_rank_leaves_any_out() -> None:
    all_reached = {"passes": 20, "passes_without_all": 0}
    [(name, where)] = by_all(**all_reached)
    assert name == UNUSED
    assert where == f"all parameters got a gradient in each of 20 backward passes {ALL}"
    some_not = {"passes": 20, "passes_without_all": 1}
    assert found(seen([0, 1, 3], **all_reached), seen([2], **some_not)) == []
    # A rank that has seen nothing, and one before its first pass.
    assert found(seen([0, 1, 3], **all_reached), seen([2])) == []
    assert by_all(passes=0, passes_without_all=0) == []


def test_graphs_that_do_not_end_where_buckets_end_are_told() -> None:
    assert by_all(splits_at_buckets=True, compiled_before=False) == []
    [(name, where)] = by_all(splits_at_buckets=False, compiled_before=False)
    assert name.startswith(COMPILED)
    assert where.startswith("torch._dynamo.config.optimize_ddp is off")
    [(name, where)] = by_all(splits_at_buckets=True, compiled_before=True)
    assert name.startswith(COMPILED)
    assert where.startswith("the module was compiled before it was wrapped")


def test_the_level_of_debugging_is_told() -> None:
    [(name, where)] = by_all(debug_level="DETAIL")
    assert name == "collectives that are checked one by one"
    assert where == f"torch.distributed.get_debug_level() is DETAIL {ALL}"
    assert by_all(debug_level="INFO") == []


def test_what_the_ranks_have_not_seen_gives_no_warning() -> None:
    assert by_all() == []
    assert by_all(**ON_NCCL) == []
    # Of ranks that could not look.
    assert hindrances({"ranks": 2, "nodes": 1, "seen": [{"ranks": [0, 1]}]}) == []


def test_each_warning_says_what_to_do_and_who_says_so() -> None:
    for rule in RULES:
        assert rule.costs
        assert rule.advice
        assert rule.source.startswith("https://")


def test_the_ranks_tell_all_variables_that_the_rules_ask_for() -> None:
    asked: set[str] = set()

    class Asked(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return default

    variables = {"variables": Asked(), "variables_later": Asked()}
    by_all(**ON_NCCL, infiniband=[PORT], **variables)
    assert asked == set(WATCHED)
