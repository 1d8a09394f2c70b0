"""How much of a job's step is communication that computing does not hide, as its ranks measure it.

The ranks measure under this project's subclass of DistributedDataParallel, which is put in the
place of torch's: see bagua_client.checking.check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bagua_autotune.system.running.measures import StepTimes, read_document
from bagua_autotune.system.running.runs import Outcome

CHECK_FILE = "check.json"
PROBED_STEPS = 10
"""Steps after the warm-up that show that no DistributedDataParallel is in the job."""
NEEDED_STEPS = 10
"""Steps of the training until there are some to read: the warm-up, and the first block."""
SHARDED = "only DistributedDataParallel has buckets to tune"
WHY_NOT = {
    "FullyShardedDataParallel": f"the model is sharded by FSDP; {SHARDED}",
    "FSDPModule": "fully_shard was called in a way that the launcher does not follow",
    "DeepSpeedEngine": "DeepSpeed was imported in a way that the launcher does not follow",
}


class Exposure:
    """See ``measures.Measure``; the score is the time of a step.

    Args:
        steps: so many end the run,
        seconds: or those that take so long together.
        tell: is called when the first steps are measured, with the time of one.

    Attributes:
        facts: what the ranks have written; see bagua_client.checking.check.
    """

    def __init__(self, steps: int, seconds: float, tell: Callable[[float], None]) -> None:
        self._steps = steps
        self._seconds = seconds
        self._tell = tell
        self._has_told = False
        self._probe = StepTimes(PROBED_STEPS)
        self.facts: Mapping[str, Any] = {}

    @property
    def steps(self) -> Sequence[tuple[float, float | None, float | None]]:
        """Return for each step, in seconds: the time of the slowest rank, how long the rank
        computed that computed longest, and how long buckets travelled; None: that was not measured.
        """
        return [tuple(step) for step in self.facts.get("steps", [])]

    def environment(self, folder: Path) -> dict[str, str]:
        """See Measure."""
        return {
            **self._probe.environment(folder),
            "BAGUA_REPLACES_DDP": "1",
            "BAGUA_AUTOTUNE_CHECK": str(folder / CHECK_FILE),
        }

    def result(self, folder: Path, is_over: bool) -> Outcome | None:
        """See Measure."""
        self.facts = read_document(folder / CHECK_FILE)
        if "refusal" in self.facts:
            return Outcome(failure=f"has nothing to measure: {self.facts['refusal']}")
        seconds = [step[0] for step in self.steps]
        if seconds and not self._has_told:
            self._has_told = True
            self._tell(median(seconds))
        if len(seconds) >= self._steps or sum(seconds) >= self._seconds or (is_over and seconds):
            return Outcome(score=median(seconds))
        if is_over and self.facts:
            return Outcome(failure=f"ended too early: {NEEDED_STEPS} steps are needed at least")
        if not self.facts and self._probe.result(folder, is_over) is not None:
            return Outcome(failure=_without_ddp(self._probe.facts))
        return None

    def describe(self, score: float) -> str:
        """See Measure."""
        return self._probe.describe(score)


def _without_ddp(facts: Mapping[str, Any]) -> str:
    """Why a training, of which some steps were seen, has written nothing.

    Args:
        facts: see ``measures.StepTimes``.
    """
    if not facts:
        return (
            "made no step of a PyTorch optimizer on this machine's rank 0; where the job has "
            "several machines, start the same command on each"
        )
    wrappers = facts.get("wrappers", [])
    if not facts["backend"]:
        return (
            "has one process only, which communicates nothing; start it as the job is started, "
            "such as: bagua-autotune check -- torchrun --nproc-per-node 2 train.py"
        )
    if not facts["has_client"]:
        return (
            "cannot be measured: its Python has no bagua_client; install bagua-autotune in the "
            "job's own environment, and run bagua-autotune from there"
        )
    for wrapper, why in WHY_NOT.items():
        if wrapper in wrappers:
            return f"has nothing to tune: {why}"
    return (
        "has nothing to tune: no model of it is wrapped in DistributedDataParallel, and only that "
        "has buckets to tune"
    )
