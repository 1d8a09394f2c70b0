"""``bagua-autotune check`` on trainings of two ranks, once under torchrun itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import torchrun
from tests.e2e.programs.check_job import COMPUTING_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

ROOT = Path(__file__).parents[2]
TRAINING = Path(__file__).parent / "programs" / "check_job.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
ENDLESS = "1000000"


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # It would be kept for the whole test session, not only for this job.
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bagua_autotune", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=190, check=False)


def figures(*arguments: str) -> Any:
    done = check("--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def training(kind: str, steps: str = ENDLESS, by: list[str] = torchrun.COMMAND) -> list[str]:
    return ["--", *by, str(TRAINING), kind, steps]


def test_a_job_that_communicates_more_than_it_computes_is_worth_tuning() -> None:
    done = check("--steps", "10", *training("exposed", by=TORCHRUN))
    assert done.returncode == 0, done.stderr
    step, fewer_bytes, advice = done.stdout.splitlines()
    share = re.fullmatch(
        r"step .* on 2 ranks of 1 node \(.* cpu, gloo; median of \d+ steps\): computing .*, "
        r"communication .*, of which .* \((\d+) %\) is exposed",
        step,
    )
    assert share is not None, step
    assert int(share.group(1)) > 20
    assert re.match(
        r"Fewer bytes on the wire could bring at most: 16 bits [\d.]+x, 8 bits [\d.]+x, "
        r"PowerSGD of rank 1 [\d.]+x\.",
        fewer_bytes,
    )
    # How much the steps vary is the machine's; what is advised follows from what is printed of it.
    told = re.fullmatch(
        r"(?:Worth tuning, at most [\d.]+x could be gained|"
        r"Not worth a search: at most [\d.]+x is possible), [\d.]+x to ([\d.]+)x is likely"
        r"(?:: (.*)|, and steps vary by .* %, so that less than ([\d.]+)x could not be shown\.)",
        advice,
    )
    assert told is not None, advice
    likely, command, shown = told.groups()
    assert (command is not None) == advice.startswith("Worth tuning"), advice
    if command is None:
        assert float(likely) <= float(shown), advice
    else:
        assert command.endswith(f"-m bagua_client --autotune {TRAINING} exposed {ENDLESS}")
    found = psutil.process_iter(["cmdline"])
    assert [p for p in found if str(TRAINING) in (p.info["cmdline"] or [])] == []


def test_a_job_that_hardly_communicates_is_measured_as_far_as_it_comes() -> None:
    found = figures("--steps", "1000", *training("hidden", "20"))
    assert 5 <= found["steps"] <= 15
    assert found["computing_seconds"] >= COMPUTING_SECONDS
    assert found["exposed_share"] < 0.5
    parts = found["computing_seconds"] + found["exposed_seconds"]
    assert found["step_seconds"] == pytest.approx(parts)
    assert found["hindrances"] == []


def test_a_training_with_our_own_class_is_measured_too() -> None:
    found = figures("--steps", "5", "--", *torchrun.COMMAND, str(ROOT / "examples" / "digits.py"))
    assert (found["ranks"], found["nodes"], found["models"]) == (2, 1, 1)
    assert 0 < found["computing_seconds"] <= found["step_seconds"]
    assert 0 < found["exposed_seconds"] <= found["communication_seconds"]


def test_what_hinders_a_job_in_silence_is_told_with_its_source() -> None:
    seen = (
        r"all parameters got a gradient in each of \d+ backward passes",
        r"torch\._dynamo\.config\.optimize_ddp is off, and torch\.compile was used",
    )
    done = check("--steps", "5", *training("hindered"))
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stdout.splitlines() if line.startswith("Warning: ")]
    told = r"\(all ranks\)\. What it does: .*\. What to do: .*\. Source: https://\S+"
    for sentence in seen:
        assert sum(bool(re.fullmatch(rf"Warning: .*: {sentence} {told}", w)) for w in warnings) == 1
    assert len(warnings) == len(seen)


def test_what_a_sharded_model_gathers_and_reduces_is_communication() -> None:
    found = figures("--steps", "5", *training("fsdp"))
    assert found["models"] == 1
    assert found["hindrances"] == []
    # What travels beside it is a difference of times, and so is this.
    assert found["computing_seconds"] >= 0.9 * COMPUTING_SECONDS
    # PowerSGD needs whole matrices. Half the traffic is gathered, in the weights' precision.
    assert set(found["most_speedup_of"]) == {"bits16", "bits8"}
    most = found["most_speedup_of"]
    assert 1 < most["bits16"] <= most["bits8"] <= found["most_speedup"]
    # Gloo does nothing beside computing.
    parts = found["computing_seconds"] + found["exposed_seconds"]
    assert found["step_seconds"] == pytest.approx(parts)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("several", r"run .* under model\.no_sync\(\)"), ("accumulates", "kept_over_micro_batches")],
)
def test_what_it_costs_to_communicate_in_each_backward_pass_is_told(kind: str, advice: str) -> None:
    done = check("--steps", "5", *training(kind))
    assert done.returncode == 0, done.stderr
    told = r"Each step has 2 backward passes that communicate: up to .* \(\d+ %\) of a step .*"
    (line,) = (each for each in done.stdout.splitlines() if re.fullmatch(told, each))
    assert re.search(advice, line), line


def test_what_cannot_be_measured_is_told() -> None:
    done = check("--steps", "5", "--", sys.executable, "-c", "")
    assert done.returncode == 1
    assert "made no step of a PyTorch optimizer" in done.stderr
    assert done.stdout == ""


def test_one_process_that_recomputes_nothing_is_told_that_there_is_nothing_to_gain() -> None:
    done = check("--steps", "5", "--", sys.executable, str(TRAINING), "alone", ENDLESS)
    assert done.returncode == 0, done.stderr
    step, advice = done.stdout.splitlines()
    assert re.fullmatch(r"step .* of one process \(.* cpu; median of \d+ steps\)", step)
    assert advice.startswith("Nothing to gain: one process communicates nothing")


def test_a_command_that_fails_gives_its_status_and_what_it_printed() -> None:
    done = check("--", sys.executable, "-c", "print('the data are not there'); raise SystemExit(7)")
    assert done.returncode == 7
    assert "the command ended with exit code 7" in done.stderr
    assert "the data are not there" in done.stderr
