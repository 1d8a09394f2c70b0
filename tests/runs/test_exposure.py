"""What is made of the files that the ranks of a checked job write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagua_runs.check import CHECK_FILE, Exposure
from bagua_runs.outcomes import STEPS_FILE

pytestmark = pytest.mark.slow

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
