"""One of PyTorch's tests on one rank: what is set up around its body and undone after it."""

from __future__ import annotations

import functools
import gc
import unittest
from contextlib import ExitStack

from tests.upstream import suite
from tests.upstream.adjusted import adjusted
from tests.upstream.classes import class_of, counts_of, standing_in
from tests.upstream.runner.cuda_as_cpu import cuda_as_cpu
from tests.upstream.runner.in_a_rank import is_native, keep_quiet, undone
from tests.upstream.runner.subject import Done


def run_test(name: str, mode: str) -> Done:
    """Runs the test on this rank; raises what the test raises."""
    prepare(mode)
    tested_class = class_of(mode, name)
    before = counts_of(mode)
    skipped = None
    with ExitStack() as stack:
        stack.enter_context(undone())
        stack.enter_context(standing_in(tested_class))
        stack.enter_context(adjusted(name, suite.module()))
        if not is_native() and suite.asks_for_gpu(name):
            stack.enter_context(cuda_as_cpu(tested_class, suite.module()))
        try:
            suite.run(name)
        except unittest.SkipTest as reason:
            skipped = str(reason)
    return Done(skipped, dict(counts_of(mode) - before))


@functools.cache
def prepare(mode: str) -> None:
    """Once in a rank: import what the tests need, and keep what they print out of the table."""
    keep_quiet()
    suite.module()
    class_of(mode)
    # Else each collection between two tests looks through all of PyTorch's modules.
    gc.freeze()
