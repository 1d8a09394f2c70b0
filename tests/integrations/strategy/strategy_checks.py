"""All that is checked of our strategies, by name; on two CPU ranks, or on two GPUs."""

from __future__ import annotations

import torch.distributed as dist

from tests.integrations.strategy import strategy_fits, strategy_loops
from tests.integrations.strategy.strategy_fits import Place

CHECKS = {**strategy_fits.CHECKS, **strategy_loops.CHECKS}


def check(name: str, place: Place) -> str:
    """On each rank."""
    found = CHECKS[name](place)
    dist.barrier()  # What one rank has written, another may still read.
    return found
