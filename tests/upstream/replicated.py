"""The tests of DistributedDataParallel: with torch's class, ours, and ours being re-cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.upstream.adjusted import LEFT_OUT, LEFT_OUT_ON_GPUS
from tests.upstream.classes import OURS, RECUT
from tests.upstream.exceptions import KNOWN, KNOWN_ON_GPUS
from tests.upstream.one_test import prepare, run_test
from tests.upstream.runner.subject import Subject
from tests.upstream.selection import names_of_gpu_tests, names_of_tests


def _environment(folder: Path) -> dict[str, str]:
    """What PyTorch's runner sets for these tests."""
    return {
        "BACKEND": "gloo",
        "TEMP_DIR": str(folder),
        "INIT_METHOD": f"file://{folder}/init",
        # A test of saved communication hooks is older than PyTorch's safe loading.
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }


def _on_gpus(folder: Path) -> dict[str, str]:
    return {**_environment(folder), "BACKEND": "nccl"}


SUBJECT = Subject(
    title="DistributedDataParallel",
    names=lambda world_size: names_of_tests(),
    world_sizes=(2, 3),
    least_shares={OURS: 0.99, RECUT: 0.95},
    least_counted=lambda world_size: 90,
    known=KNOWN,
    left_out=LEFT_OUT,
    prepare=prepare,
    run=run_test,
    changed="recut",
    environment=_environment,
)
NATIVE = replace(
    SUBJECT,
    names=lambda world_size: names_of_gpu_tests(),
    world_sizes=(2,),
    least_counted=lambda world_size: 60,
    known=KNOWN_ON_GPUS,
    left_out=LEFT_OUT_ON_GPUS,
    environment=_on_gpus,
    backend="nccl",
)
