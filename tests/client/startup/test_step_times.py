"""The times of any PyTorch job's steps, as its optimizers make them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bagua_client.startup.step_times import WARMUP_STEPS, Recorder


def _train(path: Path, steps: int) -> torch.Tensor:
    """The weights of a training whose steps are timed."""
    weights = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    Recorder(str(path), 2).begin()
    for _ in range(steps):
        weights.grad = torch.ones(3)
        optimizer.step()
    return weights.detach()


def test_steps_after_the_warm_up_are_written(tmp_path: Path) -> None:
    _train(tmp_path / "found", WARMUP_STEPS + 4)
    seconds = json.loads((tmp_path / "found").read_text())["step_seconds"]
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_a_file_that_cannot_be_written_ends_the_timing_in_a_line_and_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = _train(tmp_path / "missing" / "found", 4)
    torch.testing.assert_close(weights, torch.full((3,), 0.6))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bagua_client: rank 0 times no steps: FileNotFoundError")
