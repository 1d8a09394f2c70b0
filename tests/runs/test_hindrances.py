"""What is made of the files that the ranks of a checked job write: figures, and which warnings
``check`` gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua_client.checking.surroundings import WATCHED
from bagua_runs.check import CHECK_FILE, Exposure
from bagua_runs.hindrances import NAMED_RANKS, hindrances
from bagua_runs.outcomes import STEPS_FILE

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


def test_the_ranks_tell_all_variables_that_the_rules_ask_for() -> None:
    asked: set[str] = set()

    class Asked(dict[str, str]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.add(name)
            return default

    variables = {"variables": Asked(), "variables_later": Asked()}
    by_all(**ON_NCCL, infiniband=[PORT], **variables)
    assert asked == set(WATCHED)


STEP = (0.4, 0.3, 0.2)


def measure(folder: Path, steps: int, **facts: Any) -> Exposure:
    """One that ends a run after 60 steps, or 60 s of them; ``steps`` were written."""
    document = {"ranks": 2, "steps": [STEP] * steps, **facts}
    (folder / CHECK_FILE).write_text(json.dumps(document))
    return Exposure(60, 60.0, lambda _: None)


@pytest.mark.parametrize(
    ("steps", "seconds", "ends"), [(59, 60.0, False), (60, 60.0, True), (26, 10.0, True)]
)
def test_a_run_ends_when_steps_enough_are_measured_or_they_took_long(
    tmp_path: Path, steps: int, seconds: float, ends: bool
) -> None:
    measure(tmp_path, steps)
    told: list[float] = []
    exposure = Exposure(60, seconds, told.append)
    assert exposure.result(tmp_path, is_over=False) is None or ends
    outcome = exposure.result(tmp_path, is_over=False)
    assert (outcome is not None and outcome.score == STEP[0]) == ends
    assert told == [STEP[0]]
    assert exposure.steps[0] == STEP


def test_a_training_that_ends_early_counts_with_the_steps_that_it_had(tmp_path: Path) -> None:
    outcome = measure(tmp_path, 5).result(tmp_path, is_over=True)
    assert outcome is not None
    assert outcome.score == STEP[0]
    nothing = measure(tmp_path, 0).result(tmp_path, is_over=True)
    assert nothing is not None
    assert nothing.failure == "ended too early: 10 steps are needed at least"


def test_a_refusal_of_the_ranks_ends_the_run_at_once(tmp_path: Path) -> None:
    exposure = measure(tmp_path, 0, refusal="a single rank communicates nothing")
    outcome = exposure.result(tmp_path, is_over=False)
    assert outcome is not None
    assert outcome.failure == "has nothing to measure: a single rank communicates nothing"


PROBED = {
    "backend": "nccl",
    "has_client": True,
    "step_seconds": [0.1] * 10,
    "wrappers": [],
    "is_over": True,
}


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({}, "no model of it is wrapped in DistributedDataParallel"),
        ({"wrappers": ["DeepSpeedEngine"]}, "DeepSpeed was imported in a way that"),
        ({"wrappers": ["DistributedDataParallel", "FullyShardedDataParallel"]}, "sharded by FSDP"),
        ({"has_client": False}, "install bagua-autotune in the job's own environment"),
        ({"backend": ""}, "has one process only"),
    ],
)
def test_steps_without_a_wrapper_of_ours_are_explained(
    tmp_path: Path, facts: dict[str, Any], sentence: str
) -> None:
    exposure = Exposure(60, 60.0, lambda _: None)
    (tmp_path / STEPS_FILE).write_text(json.dumps({**PROBED, "is_over": False}))
    assert exposure.result(tmp_path, is_over=False) is None
    (tmp_path / STEPS_FILE).write_text(json.dumps({**PROBED, **facts}))
    outcome = exposure.result(tmp_path, is_over=False)
    assert outcome is not None
    assert sentence in outcome.failure
