"""Around each of PyTorch's tests in a rank that stays for the next ones."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal import common_utils


def keep_quiet() -> None:
    """Keep what the tests print out of the table, once in a rank."""
    if "UPSTREAM_OUTPUT" not in os.environ:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.dup2(null, sys.stderr.fileno())


def is_native() -> bool:
    """Whether the ranks have GPUs, so that nothing has to read as the CPU; within a group."""
    return "nccl" in dist.get_backend_config()


@contextmanager
def undone() -> Iterator[None]:
    """What tests leave behind in a process does not reach the next one."""
    environment = dict(os.environ)
    debug_level = dist.get_debug_level()  # type: ignore[attr-defined]
    always_warns = torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        common_utils.set_rng_seed(common_utils.SEED)  # type: ignore[no-untyped-call]
        # PyTorch's tests run in processes of their own, where each warning is the first.
        torch.set_warn_always(True)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            dist.set_debug_level(debug_level)  # type: ignore[attr-defined]
            torch.set_warn_always(always_warns)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            torch.set_grad_enabled(True)
            torch.compiler.reset()
