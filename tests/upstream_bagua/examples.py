"""Runs Bagua's examples from its PyPI release as its users would, tuned, and reads how they ended.

Their pictures of digits are scikit-learn's, in the files that torchvision looks for: the machine
needs no network.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits

from tests.upstream_bagua.running import FAILED, PASSED, SKIPPED, Result, run_command

ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "low_precision_decentralized",
    "qadam",
    "async",
)
MNIST = "mnist/main.py"
LIMITS = ("--autotune_max_samples", "6")
TRAIN_SAMPLES, TEST_SAMPLES = 12_000, 400
CHANCE = -float(np.log(1 / 10))


@dataclass(frozen=True)
class Example:
    """A command line of Bagua's documentation.

    Attributes:
        file: under ``examples``.
        ranks: on this machine.
        loss_below: what the last loss that it prints must be; None: it prints none.
        is_tuned: whether it trains long enough for a whole tuning.
        loss_name: how it calls its loss.
    """

    file: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    loss_below: float | None = None
    is_tuned: bool = True
    loss_name: str = "Average loss"
    needs_gpu: bool = False
    needs_torchvision: bool = True

    def __str__(self) -> str:
        return " ".join(("examples/" + self.file, *self.arguments))


EXAMPLES = (
    # 8 ranks are written into it.
    Example("communication_primitives/main.py", ranks=8, is_tuned=False, needs_torchvision=False),
    *(
        Example(
            MNIST,
            ("--algorithm", algorithm, "--fuse-optimizer", "--epochs", "2"),
            loss_below=0.5 * CHANCE,
        )
        for algorithm in ALGORITHMS
    ),
    Example("elastic_training/main.py", ("--epochs", "2"), loss_below=0.5 * CHANCE),
    *(
        Example(
            "benchmark/synthetic_benchmark.py",
            ("--algorithm", algorithm),
            loss_below=float(np.log(1000)),
            loss_name="TrainLoss",
            needs_gpu=True,
        )
        for algorithm in ALGORITHMS
    ),
)


def run_example(example: Example, folder: Path, devices: int, shows_output: bool = False) -> Result:
    """In ``examples`` of the folder; see :func:`running.run_file`."""
    if why := _lacking(example, devices):
        return Result(str(example), SKIPPED, reason=why)
    script = folder / "examples" / example.file
    command = [sys.executable, "-m", "bagua_client.run", "--as-bagua", "--autotune", *LIMITS]
    command += ["--nproc-per-node", str(example.ranks), "--master-port", "0", script.name]
    began = time.monotonic()
    calls = max(devices, example.ranks) if devices else 0
    output, exit_code = run_command([*command, *example.arguments], script.parent, calls)
    seconds = time.monotonic() - began
    if shows_output:
        print(output)
    missed = f"exit code {exit_code}" if exit_code else "; ".join(_misses(example, output))
    return Result(str(example), FAILED if missed else PASSED, seconds, missed or _ending(output))


def write_digits(folder: Path) -> None:
    """Scikit-learn's digits, of 8 x 8 pixels, where the examples look for MNIST's of 28 x 28."""
    images, labels = load_digits(return_X_y=True)
    small = images.reshape(-1, 8, 8) * (255 / 16)
    large = np.pad(np.kron(small, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(labels))
    raw = folder / "examples" / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, chosen in (
        ("train", np.resize(order[TEST_SAMPLES:], TRAIN_SAMPLES)),
        ("t10k", order[:TEST_SAMPLES]),
    ):
        _write(raw / f"{name}-images-idx3-ubyte", large[chosen].astype(np.uint8))
        _write(raw / f"{name}-labels-idx1-ubyte", labels[chosen].astype(np.uint8))


def _write(path: Path, array: npt.NDArray[np.uint8]) -> None:
    """In MNIST's format: 8 for bytes, the number of dimensions, each of them, the values."""
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def _lacking(example: Example, devices: int) -> str:
    """What the machine has not; empty: it has all."""
    if not devices and not torch.cuda.is_available():
        return "asks for GPUs"
    if example.needs_gpu and not torch.cuda.is_available():
        return "asks for a GPU that computes"
    if example.needs_torchvision and importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    return ""


def _misses(example: Example, output: str) -> Iterator[str]:
    if example.loss_below is not None:
        losses = re.findall(rf"{example.loss_name}: ([\d.]+|nan)", output)
        if not losses or not float(losses[-1]) < example.loss_below:
            yield f"losses {losses[-3:]}, not below {example.loss_below:.2f}"
    if example.is_tuned and not _ending(output):
        yield "not tuned"


def _ending(output: str) -> str:
    """The line of the tuning's end."""
    found: Sequence[str] = re.findall(r"autotune: (.*\d trials, .*)", output)
    return found[-1] if found else ""
