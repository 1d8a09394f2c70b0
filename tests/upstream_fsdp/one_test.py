"""One of PyTorch's tests of ``fully_shard`` on one rank."""

from __future__ import annotations

import functools
import gc
import unittest
from collections import Counter
from contextlib import ExitStack
from types import ModuleType

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel

from tests.upstream.runner.cuda_as_cpu import cuda_as_cpu
from tests.upstream.runner.in_a_rank import is_native, keep_quiet, undone
from tests.upstream.runner.subject import STOCK, Done
from tests.upstream_fsdp import suite


def run_test(name: str, mode: str) -> Done:
    """Runs the test on this rank; raises what the test raises."""
    prepare(mode)
    counts, skipped = Counter[str](), None
    with ExitStack() as stack:
        stack.enter_context(undone())
        # What DTensor remembers of the groups of an earlier test, whose names are others' now.
        stack.callback(_clear_sharding_prop_cache)
        if mode != STOCK:
            stack.enter_context(_changes().being_made(name, counts))
        if not is_native():
            module, devices = suite.module_of(name), dist.get_world_size()
            stack.enter_context(cuda_as_cpu(DistributedDataParallel, module, devices))
        try:
            suite.run(name)
        except unittest.SkipTest as reason:
            skipped = str(reason)
    return Done(skipped, dict(counts))


@functools.cache
def prepare(mode: str) -> None:
    """Once in a rank: import what the tests need, and keep what they print out of the table."""
    keep_quiet()
    suite.prepare()
    if mode != STOCK:
        _changes().follow()
    # Else each collection between two tests looks through all of PyTorch's modules.
    gc.freeze()


def _changes() -> ModuleType:
    """Imported only where something of ours takes part."""
    from tests.upstream_fsdp import changes

    return changes
