"""Runs Bagua's examples from its PyPI release as its users would, tuned, and reads how they ended.

Their pictures of digits are scikit-learn's, in the files that torchvision looks for: the machine
needs no network.
"""

from __future__ import annotations

import importlib.util
import os
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

from tests.deploy.slurm import free_ports
from tests.upstream_bagua.running import FAILED, PASSED, SHARED_GPU, SKIPPED, Result, run_command

ALGORITHMS = (
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "low_precision_decentralized",
    "qadam",
    "async",
)
LIMITS = ("--autotune_max_samples", "6", "--autotune_fresh")
TRAIN_SAMPLES, TEST_SAMPLES = 12_000, 400
GUESSED_DIGITS, GUESSED_IMAGENET = float(np.log(10)), float(np.log(1000))
"""The loss of a guess among 10 and 1,000 classes."""


@dataclass(frozen=True)
class Example:
    """A command line of Bagua's documentation.

    Attributes:
        file: under ``examples``.
        algorithm: None: it takes none.
        arguments: beside the algorithm.
        ranks: on this machine.
        loss_below: what the last loss that it prints must be; None: it prints none.
        loss_name: how it calls its loss.
        is_tuned: whether its tuning must come to its end.
        has_epochs: so many are told that the tuning can end.
    """

    file: str
    algorithm: str | None = None
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    loss_below: float | None = 0.5 * GUESSED_DIGITS
    loss_name: str = "Average loss"
    is_tuned: bool = True
    has_epochs: bool = True
    needs_gpu: bool = False
    needs_torchvision: bool = True

    def __str__(self) -> str:
        name = f"examples/{Path(self.file).parent}"
        return name if self.algorithm is None else f"{name}: {self.algorithm}"

    @property
    def words(self) -> list[str]:
        """Of its command line."""
        algorithm = ["--algorithm", self.algorithm] if self.algorithm else []
        return [Path(self.file).name, *algorithm, *self.arguments]


def _mnist(algorithm: str) -> Example:
    # Its own rate of 1 is for Adadelta. For qadam, 100 steps are a short warm-up of this model: see
    # docs/algorithms.md.
    rate = ("--lr", "0.0001") if algorithm == "qadam" else ()
    return Example(
        "mnist/main.py",
        algorithm,
        ("--fuse-optimizer", "--set-deterministic", *rate),
        is_tuned=algorithm != "async",  # Its ranks do not step together.
    )


def _synthetic(algorithm: str) -> Example:
    return Example(
        "benchmark/synthetic_benchmark.py",
        algorithm,
        # Qadam is tuned after its warm-up.
        ("--num-iters", "100" if algorithm == "qadam" else "40"),
        loss_below=GUESSED_IMAGENET,
        loss_name="TrainLoss",
        is_tuned=algorithm != "async",
        has_epochs=False,
        needs_gpu=True,
    )


EXAMPLES = (
    Example(
        "communication_primitives/main.py",
        ranks=8,  # It lists what goes to each of them.
        loss_below=None,
        is_tuned=False,
        has_epochs=False,
        needs_torchvision=False,
    ),
    *map(_mnist, ALGORITHMS),
    Example("elastic_training/main.py"),
    *map(_synthetic, ALGORITHMS),
)


def run_example(example: Example, folder: Path, devices: int, shows_output: bool = False) -> Result:
    """In ``examples`` of the folder; see :func:`running.run_file`."""
    if why := _lacking(example, devices):
        return Result(str(example), SKIPPED, reason=why)
    script = folder / "examples" / example.file
    command = [sys.executable, "-m", "bagua_client.run", "--as-bagua", "--autotune", *LIMITS]
    command += ["--nproc-per-node", str(example.ranks), "--master-port", str(free_ports(1)[0])]
    began = time.monotonic()
    is_on_cpu = devices and SHARED_GPU not in os.environ
    epochs = ["--epochs", "4" if is_on_cpu else "8"] if example.has_epochs else []
    calls = max(devices, example.ranks) if devices else 0
    output, exit_code = run_command([*command, *example.words, *epochs], script.parent, calls)
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
    is_on_cpu = devices and SHARED_GPU not in os.environ
    if is_on_cpu and example.needs_gpu:
        return "asks for a GPU that computes"
    if not is_on_cpu and max(devices, torch.cuda.device_count()) < example.ranks:
        return f"asks for {example.ranks} GPUs"
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
    found: Sequence[str] = re.findall(r"autotune: (.*\d trials?, .*)", output)
    return found[-1] if found else ""
