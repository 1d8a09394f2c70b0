"""Runs a training script whose buckets get other sizes every 5 steps; the script is not asked.

python -m bagua_client tests/integrations/scripts/swapping.py SCRIPT ARGUMENTS

For each wrapper of ours the sizes that its buckets had are told in ``FOLDER/cuts-RANK.json``, where
FOLDER is the first of the arguments.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from bagua_client import Configuration, DistributedDataParallel

SIZES = (1500, 1, 4000, 2**20, 2500)
EVERY = 5


class Swaps:
    """Follows the wrapper that trains now."""

    def __init__(self) -> None:
        self._wrapper: Any = None
        self._steps = 0
        self.cuts: list[list[list[int]]] = []

    def passed(self, module: Any, *_: Any) -> None:
        """A module's forward pass is over."""
        if type(module) is DistributedDataParallel and module is not self._wrapper:
            self._wrapper, self._steps = module, 0
            self.cuts.append([])

    def stepped(self, *_: Any) -> None:
        self._steps += 1
        buckets = self._wrapper.reducer._get_zeros_like_grad_buckets()
        cut = [bucket.buffer().numel() for bucket in buckets]
        if cut not in self.cuts[-1]:
            self.cuts[-1].append(cut)
        if self._steps % EVERY == 0:
            size = SIZES[self._steps // EVERY % len(SIZES)]
            assert self._wrapper.reconfigure(Configuration(size))


if __name__ == "__main__":
    swaps = Swaps()
    register_module_forward_hook(swaps.passed)
    register_optimizer_step_post_hook(swaps.stepped)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    Path(sys.argv[1], f"cuts-{os.environ['RANK']}.json").write_text(json.dumps(swaps.cuts))
