"""The command line of the runs of PyTorch's own tests, where there are no GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.upstream.runner.command import main
from tests.upstream.selection import names_of_gpu_tests, names_of_tests
from tests.upstream.suite import NATIVE, SUBJECT

pytestmark = pytest.mark.slow


def test_native_ranks_want_a_gpu_each(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = torch.cuda.device_count() + 1
    assert main(SUBJECT, NATIVE, ["--native", "--world-sizes", str(ranks)]) == 2
    wanted = f"--native gives each rank a GPU: {ranks} ranks, and this machine has {ranks - 1}\n"
    assert capsys.readouterr().err == wanted


def test_the_native_tests_are_those_that_ask_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SUBJECT, NATIVE, ["--native", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == names_of_gpu_tests()
    assert "test_DistributedDataParallel" in listed
    assert "test_DistributedDataParallelCPU" in {*names_of_tests()} - {*listed}


def test_a_run_without_time_begins_no_test_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    arguments = ["--modes", "ours", "--world-sizes", "2", "--seconds", "0", "--json", str(file)]
    assert main(SUBJECT, NATIVE, arguments) == 0
    left = len(SUBJECT.names(2))
    assert f"INCOMPLETE: {left} tests were not begun within 0 s" in capsys.readouterr().out
    assert json.loads(file.read_text())["results"] == []


def test_results_are_kept_and_ones_that_pass_in_stock_are_run_with_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("expecttest")
    file = tmp_path / "results.json"
    arguments = ["--modes", "ours", "--world-sizes", "2", "--only", "test_ddp_namedtuple"]
    assert main(SUBJECT, NATIVE, [*arguments, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert [(each["mode"], each["outcome"]) for each in results] == [
        ("stock", "passed"),
        ("ours", "passed"),
    ]
    assert "INCOMPLETE" not in capsys.readouterr().out
