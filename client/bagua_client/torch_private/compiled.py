"""What torch's compiler has done in this process; it is asked only where the job has loaded it."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch


def frames_compiled() -> int:
    """The number of Python frames that torch.compile has compiled in this process so far. It counts
    them itself, and has no public way to ask."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["ok"])


def splits_at_buckets() -> bool:
    """Whether torch.compile splits what it compiles inside a DistributedDataParallel, so that its
    buckets can leave during the backward pass.

    Its setting ``torch._dynamo.config.optimize_ddp`` is a boolean, or the name of a way; of these,
    only ``no_optimization`` has "no comm/compute overlap" by its own comment.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is None or dynamo.config.optimize_ddp not in (False, "no_optimization")


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether all of ``module`` is given to the compiler: by ``torch.compile(module)``, or in place
    by ``module.compile()``, which leaves no public trace."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    is_wrapped = frames is not None and isinstance(module, frames.OptimizedModule)
    return is_wrapped or module._compiled_call_impl is not None


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """What ``torch.compile`` was given to make ``module``; itself if it was not made so. There is
    no public way to ask."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or not isinstance(module, frames.OptimizedModule):
        return module
    return cast(torch.nn.Module, module._orig_mod)
