"""A rank of a job that trains engines of DeepSpeed from the same seeds, and compares their numbers.

    BAGUA_AUTOTUNE=1 torchrun --nproc-per-node 2 benchmarks/support/jobs/zero_equal.py SPEC OUT

SPEC is a JSON file: a workload (see ``benchmarks/support/workloads``) and
``{"steps": 60, "configurations": [{"bucket_bytes": 1000000}, ...]}``. An untouched engine is
trained first; then one whose sizes are another of these before each step, and one that is tuned
live. Should their numbers differ, an untouched one again: perhaps DeepSpeed's own order is not
always the same. Rank 0 writes OUT: by training, how many losses, and tensors of weights and of the
optimizer's state on all ranks, differ from those of the first.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bagua_client import Configuration, tune
from benchmarks.support.jobs.rank import run
from benchmarks.support.workloads import training
from benchmarks.support.workloads.sharded import ZeroTraining

RECUT, LIVE, AGAIN = "re-cut before each step", "tuned live", "untouched again"


@dataclass(frozen=True)
class Numbers:
    """Of one training, on this rank."""

    losses: torch.Tensor
    state: Mapping[str, torch.Tensor]
    configurations: int

    def beside(self, expected: Numbers) -> dict[str, Any]:
        """How many of all ranks differ. All ranks must call it together."""
        if list(self.state) != list(expected.state):
            raise RuntimeError(f"other tensors: {list(self.state)}, not {list(expected.state)}")
        differ = [not torch.equal(each, expected.state[name]) for name, each in self.state.items()]
        losses = (self.losses != expected.losses).sum().item()
        counts = torch.tensor(
            [losses, len(self.losses), sum(differ), len(differ)], device=self.losses.device
        )
        dist.all_reduce(counts)
        names = ("losses_differ", "losses", "tensors_differ", "tensors")
        found = dict(zip(names, counts.tolist(), strict=True))
        return {**found, "configurations": self.configurations}


def trained(
    workload: ZeroTraining, engine: Any, steps: int, before: Callable[[int], object]
) -> Numbers:
    """The numbers of the engine, which is gone then."""
    losses, used = [], set()
    for number in range(steps):
        before(number)
        used.add(str(getattr(engine, "configuration", "")))
        torch.manual_seed(1000 * number + dist.get_rank())
        losses.append(workload.step(engine, workload.batch()))
    found = Numbers(torch.stack(losses), state_of(engine), len(used))
    engine.destroy()
    return found


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """The weights, gathered, and this rank's part of the optimizer's, in full precision."""
    import deepspeed

    found = {}
    for name, value in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([value]):
            found[name] = value.detach().clone()
    for place, (part, state) in enumerate(engine.optimizer.optimizer.state.items()):
        found[f"{place}"] = part.detach().clone()
        for key, value in state.items():
            found[f"{place} {key}"] = torch.as_tensor(value).clone()
    return found


def compared(spec: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """What OUT says.

    Raises:
        RuntimeError: the job is not tuned at all.
    """
    service = {name: os.environ.pop(name) for name in list(os.environ) if "BAGUA_AUTOTUNE" in name}
    # Some kernels sum in an order of chance otherwise.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # DeepSpeed allocates far more for its buckets than it uses.
    torch.utils.deterministic.fill_uninitialized_memory = False
    workload = training(spec, dist.get_rank(), device)
    assert isinstance(workload, ZeroTraining)

    def untouched() -> Numbers:
        return trained(workload, workload.model(), spec["steps"], lambda step: None)

    def recut() -> Numbers:
        engine: Any = tune(workload.model())
        default = engine.configuration.to_json()
        changes = [Configuration.from_json({**default, **each}) for each in spec["configurations"]]

        def change(step: int) -> None:
            if step and not engine.reconfigure(changes[step % len(changes)]):
                raise RuntimeError(f"the engine cannot have {changes[step % len(changes)]}")

        return trained(workload, engine, spec["steps"], change)

    def live() -> Numbers:
        os.environ.update(service)
        engine: Any = tune(workload.model())
        if not engine.is_tuning:
            raise RuntimeError("the job is not tuned; set BAGUA_AUTOTUNE=1 and start several ranks")
        return trained(workload, engine, spec["steps"], lambda step: None)

    expected, found = untouched(), {}
    for name, way in {RECUT: recut, LIVE: live}.items():
        gc.collect()
        found[name] = way().beside(expected)
    if any(each["losses_differ"] or each["tensors_differ"] for each in found.values()):
        found[AGAIN] = untouched().beside(expected)
    return {"trainings": found}


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums are of chance, too
    run(__doc__, compared)


if __name__ == "__main__":
    main()
