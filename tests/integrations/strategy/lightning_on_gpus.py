"""The checks of ``strategy="bagua"`` on two GPUs with NCCL, where there may be no pytest.

    PYTHONPATH=client:autotune python -m tests.integrations.strategy.lightning_on_gpus

in a clone prints a line for each, and exits with 1 if one failed. ``--cpu`` tries them on two CPU
ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist

from tests.integrations.strategy.strategy_fits import Place
from tests.integrations.strategy.strategy_loops import CHECKS, check
from tests.ranks import RankFailure, RankPool

VARIABLES = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""As torchrun says: Lightning starts no processes of its own; the ranks have met already."""


def _check(name: str, place: Place) -> str:
    """On each rank, whose process group is gloo's."""
    if place.accelerator == "gpu" and dist.get_backend() != "nccl":
        rank, ranks = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
        dist.init_process_group(
            "nccl",
            init_method=f"file://{place.folder}/store",
            rank=rank,
            world_size=ranks,
            device_id=torch.device("cuda", rank),
        )
    return check(name, place)


def _run(names: Sequence[str], package: str, accelerator: str, seconds: float) -> list[str]:
    """Those that failed."""
    failed = []
    pool = RankPool([2], variables={**VARIABLES, "OMP_NUM_THREADS": "2"})
    try:
        for name in names:
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                place = Place(package, folder, accelerator)
                try:
                    found, *_ = pool.run(_check, name, place, timeout_seconds=seconds)
                    outcome = "ok"
                except RankFailure as failure:
                    outcome, found = "FAILED", str(failure)
                    failed.append(name)
            took = time.monotonic() - began
            print(f"{outcome:7} {name:36} {took:5.1f} s  {found}", flush=True)
    finally:
        pool.close()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--only", default="", help="checks whose names have this in them")
    parser.add_argument("--package", help="lightning or pytorch_lightning")
    parser.add_argument("--seconds", type=float, default=120.0, help="that a check may take")
    arguments = parser.parse_args()
    if not arguments.cpu and torch.cuda.device_count() < 2:
        sys.exit("needs two GPUs; --cpu tries the checks on two CPU ranks")
    packages = [p for p in ("lightning", "pytorch_lightning") if find_spec(p) is not None]
    package = arguments.package or packages[0]
    names = [name for name in CHECKS if arguments.only in name]
    accelerator = "cpu" if arguments.cpu else "gpu"
    print(f"{package}, torch {torch.__version__}, two ranks on {accelerator}", flush=True)
    failed = _run(names, package, accelerator, arguments.seconds)
    print(f"{len(names) - len(failed)} of {len(names)} checks passed", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
