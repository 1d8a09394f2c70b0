"""Runs Bagua's tests from its PyPI release, a process for each file, and reads what became of them.

They run in a copy without the release's own ``bagua``, so that ``import bagua`` finds ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bagua_client.launcher import AS_BAGUA
from tests.outside import BAGUA, folder_of

TORCHS = "tests PyTorch itself; Bagua's part of it is in test_bagua_ddp.py"
LIGHTNINGS = "needs the BaguaStrategy of Lightning 1.9; ours is tested in tests/integrations"
EXCLUDED_FILES = {
    "torch_api/data_parallel/test_c10d_common.py": TORCHS,
    "pytorch_lightning/test_bagua_strategy.py": LIGHTNINGS,
}
"""Not run, on any number of devices."""
FUSED = (
    "asserts that an optimizer does not fuse beside with_bagua(do_flatten=True); here it does, "
    "and the results are equal"
)
EXCLUDED_TESTS = {
    "contrib/test_fused_optimizer.py::TestFusedOptimizer::test_decentralized": FUSED,
    "contrib/test_fused_optimizer.py::TestFusedOptimizer::test_gradient_allreduce": FUSED,
    "comm/test_communicator.py::TestCommunication::test_reduce_scatter": (
        "asserts that a mean over n ranks equals itself divided by n: passes on one GPU only"
    ),
}
"""Not run on GPUs, or on what is called so."""
EXCLUDED_ON_THE_CPU = {
    "contrib/test_sync_bn.py::Test_Sync_Bn::test_syncbn": (
        "compares with torch.nn.SyncBatchNorm, which refuses tensors of the CPU; ours is compared "
        "with one process in tests/training/test_sync_batch_norm.py"
    )
}
"""Not run on what is called a GPU."""


ROOT = Path(__file__).resolve().parents[2]
HARNESS = Path(__file__).parent / "harness"
ONE_FILE = Path(__file__).parent / "one_file.py"
SHARED_GPU = "BAGUA_UPSTREAM_SHARED_GPU"
"""Set in the environment, it lets the ranks share the only GPU; the harness reads it, too."""
FILE_SECONDS = 1200
"""After so long the tests of a file that have no result yet have failed."""

PASSED, FAILED, SKIPPED, EXCLUDED = "passed", "failed", "skipped", "excluded"


@dataclass(frozen=True)
class Result:
    """One test on a number of devices.

    Attributes:
        test: file, class and name, or only the file if all its tests are excluded or none began.
        outcome: "passed", "failed", "skipped" or "excluded".
        reason: why, where it did not pass.
    """

    test: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""


def files(folder: Path) -> list[str]:
    """The test files of the copy, under ``tests``."""
    tests = folder / "tests"
    found = (path.relative_to(tests) for path in tests.rglob("test_*.py"))
    return sorted(str(path) for path in found if path.parts[0] != "internal")


def copy_release(folder: Path) -> None:
    """Bagua's ``tests`` and ``examples``, without ``bagua``, into a folder."""
    for name in ("tests", "examples"):
        shutil.copytree(folder_of(BAGUA) / name, folder / name)


def run_file(folder: Path, file: str, devices: int, shows_output: bool = False) -> Iterator[Result]:
    """All tests of one file.

    Args:
        devices: 0: what there is; else the CPU is called so many GPUs.
    """
    if file in EXCLUDED_FILES:
        yield Result(file, EXCLUDED, reason=EXCLUDED_FILES[file])
        return
    report = folder / "results"
    report.unlink(missing_ok=True)
    module = f"tests.{file.removesuffix('.py').replace('/', '.')}"
    command = [sys.executable, str(ONE_FILE), str(report), module]
    excluded = dict(EXCLUDED_TESTS) if devices or torch.cuda.is_available() else {}
    if devices and SHARED_GPU not in os.environ:
        excluded |= EXCLUDED_ON_THE_CPU
    for test, why in excluded.items():
        if test.startswith(f"{file}::"):
            command.append(test.removeprefix(f"{file}::").replace("::", "."))
            yield Result(test, EXCLUDED, reason=why)
    output, exit_code = run_command(command, folder, devices, [folder, AS_BAGUA])
    if shows_output:
        print(output)
    for line in report.read_text().splitlines() if report.exists() else ():
        found = json.loads(line)
        yield Result(**{**found, "test": f"{file}::{found['test']}"})
    if exit_code:
        yield Result(file, FAILED, reason=f"exit code {exit_code}: {_last_line(output)}")


def run_command(
    command: Sequence[str], folder: Path, devices: int, paths: Sequence[Path | str] = ()
) -> tuple[str, int]:
    """What it prints in that folder, and its exit code.

    Args:
        devices: see :func:`run_file`.
        paths: of Python's modules.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(folder, devices, paths),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=FILE_SECONDS)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # Torchrun's workers have sessions of their own.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        return f"had not ended after {FILE_SECONDS} s", -1
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ranks that a test left behind would hold its ports."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(folder: Path, devices: int, paths: Sequence[Path | str]) -> dict[str, str]:
    kept = {
        name: os.environ[name]
        for name in os.environ
        if not name.startswith("BAGUA_") or name.startswith("BAGUA_UPSTREAM_")
    }
    paths = [HARNESS, *paths, ROOT / "client", ROOT / "autotune"]
    given = os.environ.get("PYTHONPATH")
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([given] if given else [])]),
        "BAGUA_UPSTREAM_DEVICES": str(devices),
        "BAGUA_AUTOTUNE_DATABASE": f"sqlite:///{folder}/jobs.db",
        "OMP_NUM_THREADS": "1",
        **({"GLOO_SOCKET_IFNAME": "lo"} if devices else {}),
    }


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
