"""The parts of torch's PowerSGD hook that hold whatever carries the buckets.

The hook itself cannot run here. It starts the second and the third collective of a bucket in
callbacks of the ones before, which over gloo come in another order on another rank; over NCCL it
makes the host wait for the device in each bucket; and it knows a bucket by its number, which
changes at a re-cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

torchs: Any = hook
"""The hook's module, untyped."""


def new_state(start: int, **arguments: Any) -> Any:
    """Return torch's PowerSGDState: the arguments, the steps done, the random numbers, and how much
    was compressed.

    Args:
        start: the first step, counted from 0, in which gradients are compressed. Torch refuses 0
            and 1, as it cuts its buckets anew after the first step; here that loses nothing.

    Raises:
        ImportError: numpy is not installed.
    """
    state = torchs.PowerSGDState(None, start_powerSGD_iter=max(start, 2), **arguments)
    state.start_powerSGD_iter = start
    return state


def orthogonalize(matrices: torch.Tensor) -> None:
    """Make the columns of each matrix orthonormal, in place. By Gram-Schmidt up to two columns and
    for 16-bit numbers: a column of zeros then becomes NaN; else by torch's QR.

    Args:
        matrices: of shape (matrices, rows, columns), with no more columns than rows.
    """
    torchs._orthogonalize(matrices)


def is_worth(rows: int, columns: int, rank: int, least_rate: float) -> bool:
    """Whether both factors of a matrix have ``least_rate`` times fewer numbers than it has."""
    found: bool = torchs._should_compress(rows, columns, rank, least_rate)[0]
    return found
