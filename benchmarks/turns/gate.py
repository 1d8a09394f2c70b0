"""Runs a training script that makes as many optimizer steps as it is allowed to, and waits.

    torchrun ... benchmarks/turns/gate.py FOLDER SCRIPT ARGUMENTS

``FOLDER/allowed`` has the number of steps after which every rank waits, and is read again until it
grows. Before the first wait a job that bagua_client tunes goes on until its tuning has ended, all
ranks in the same step. Whenever it waits, a rank writes ``FOLDER/RANK.json``: the steps that it has
made, the seconds of those since it waited last, and the configuration of its model.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

LOOK_SECONDS = 0.005


class Gate:
    """In one rank."""

    def __init__(self, folder: Path) -> None:
        self._allowed_file = folder / "allowed"
        self._told_file = folder / f"{os.environ['RANK']}.json"
        self._steps = 0
        self._allowed = int(self._allowed_file.read_text())
        self._marks = [time.perf_counter()]
        self._tuned: Any = None

    def stepped(self, *_: Any) -> None:
        """An optimizer has made a step."""
        self._steps += 1
        self._marks.append(time.perf_counter())
        if self._steps == 1:
            self._tuned = _tuned_model()
        if self._steps < self._allowed or (self._tuned is not None and self._tuned.is_tuning):
            return
        self._tell()
        while self._allowed <= self._steps:
            time.sleep(LOOK_SECONDS)
            self._allowed = int(self._allowed_file.read_text())
        self._marks = [time.perf_counter()]

    def _tell(self) -> None:
        found = {
            "steps": self._steps,
            "seconds": [end - begin for begin, end in pairwise(self._marks)],
            "configuration": self._tuned and self._tuned.configuration.to_json(),
            "words": self._tuned and str(self._tuned.configuration),
        }
        new = self._told_file.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(self._told_file)


def _tuned_model() -> Any:
    """The script's model, if it is one of ours; looked for once, as the script does not say it."""
    ours = sys.modules.get("bagua_client")
    if ours is None or os.environ.get("BAGUA_AUTOTUNE") != "1":
        return None
    found = [each for each in gc.get_objects() if type(each) is ours.DistributedDataParallel]
    if len(found) != 1:
        raise RuntimeError(f"the script has {len(found)} tuned models, and one was expected")
    return found[0]


if __name__ == "__main__":
    gate = Gate(Path(sys.argv[1]))
    del sys.argv[:2]
    # As Python would have it: the script imports what is beside it.
    sys.path[0] = str(Path(sys.argv[0]).parent)
    register_optimizer_step_post_hook(gate.stepped)
    runpy.run_path(sys.argv[0], run_name="__main__")
