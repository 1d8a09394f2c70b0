"""One of PyTorch's tests on one rank: what is set up around its body and undone after it."""

from __future__ import annotations

import functools
import gc
import os
import sys
import unittest
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.testing._internal import common_utils

from tests.upstream import suite
from tests.upstream.adjusted import adjusted
from tests.upstream.classes import class_of, counts_of, standing_in
from tests.upstream.cuda_as_cpu import cuda_as_cpu


@dataclass(frozen=True)
class Done:
    """A test that did not fail on this rank.

    Attributes:
        skipped: why, if it was.
        counts: of what the class under test did meanwhile, if it counts anything.
    """

    skipped: str | None
    counts: dict[str, int]


def run_test(name: str, mode: str) -> Done:
    """Runs the test on this rank; raises what the test raises."""
    prepare(mode)
    tested_class = class_of(mode, name)
    before = counts_of(mode)
    skipped = None
    with ExitStack() as stack:
        stack.enter_context(_undone())
        stack.enter_context(standing_in(tested_class))
        stack.enter_context(adjusted(name, suite.module()))
        if suite.asks_for_gpu(name):
            stack.enter_context(cuda_as_cpu(tested_class, suite.module()))
        try:
            suite.run(name)
        except unittest.SkipTest as reason:
            skipped = str(reason)
    return Done(skipped, dict(counts_of(mode) - before))


@functools.cache
def prepare(mode: str) -> None:
    """Once in a rank: import what the tests need, and keep what they print out of the table."""
    if "UPSTREAM_OUTPUT" not in os.environ:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.dup2(null, sys.stderr.fileno())
    suite.module()
    class_of(mode)
    # Else each collection between two tests looks through all of PyTorch's modules.
    gc.freeze()


@contextmanager
def _undone() -> Iterator[None]:
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
