"""PyTorch's tests of ``fully_shard``, with torch alone, and with models that we change: imported
from their files and run one by one on a rank.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_cuda, common_distributed, common_fsdp
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase

from tests.upstream.runner.cuda_as_cpu import cuda_as_cpu
from tests.upstream.runner.in_a_rank import is_native, keep_quiet, undone
from tests.upstream.runner.subject import STOCK, Done, Subject
from tests.upstream_fsdp import sources
from tests.upstream_fsdp.exceptions import FILES_LEFT_OUT, KNOWN, LEFT_OUT

_PACKAGE = "upstream_fsdp_tests"
# Asked for by tests of this release's; newer releases have them by other names.
_OLDER_NAMES = {"test_compiled_fsdp": "compiled_fsdp_test"}


def names_of_tests(world_size: int) -> list[str]:
    """Those that run on so many ranks where there are so many GPUs, as ``file.class.test``."""
    found = []
    with mock.patch.object(torch.cuda, "device_count", return_value=world_size):
        for path in _files():
            for name, case in _cases(path):
                if _world_size_of(case) == world_size:
                    tests = unittest.TestLoader().getTestCaseNames(case)
                    found += [f"{_stem(path)}.{name}.{test}" for test in tests]
    return found


def names_of_gpu_tests(world_size: int) -> list[str]:
    """Those of them that are for a process on each GPU, not for threads that share one."""
    on_threads = common_distributed.MultiThreadedTestCase
    return [
        name for name in names_of_tests(world_size) if not issubclass(_parts(name)[1], on_threads)
    ]


def run(name: str) -> None:
    """The body of the test, on this rank, in the process group that is there.

    Raises:
        unittest.SkipTest: it does not apply.
    """
    _, case_class, test = _parts(name)
    case: Any = case_class(test)
    case.rank = dist.get_rank()
    if inspect.getattr_static(case, "__unittest_skip__", False):
        raise unittest.SkipTest(case.__unittest_skip_why__)
    try:
        getattr(type(case), test)(case)
    except SystemExit as skipped:  # The way out of those of PyTorch's decorators that skip.
        raise unittest.SkipTest(f"exit code {skipped.code}") from None


def _parts(name: str) -> tuple[ModuleType, type[unittest.TestCase], str]:
    stem, case, test = name.split(".")
    (path,) = [path for path in _files() if _stem(path) == stem]
    module = _module(path)
    return module, getattr(module, case), test


def _files() -> list[Path]:
    files = sources.files_in(sources.find())
    return [path for path in files if _stem(path) not in FILES_LEFT_OUT]


def _stem(path: Path) -> str:
    return path.stem.removeprefix("test_").removeprefix("fully_shard_")


def _cases(path: Path) -> Iterator[tuple[str, type[unittest.TestCase]]]:
    module = _module(path)
    for name, value in vars(module).items():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        # Some make process groups of their own, and are of what others do than fully_shard.
        is_for_us = is_own and not issubclass(value, DTensorTestBase)
        if is_for_us and issubclass(value, unittest.TestCase):
            yield name, value


def _world_size_of(case: type[unittest.TestCase]) -> int:
    """Without making one, which would make its process group."""
    size = inspect.getattr_static(case, "world_size", 0)
    return int(size.fget(object.__new__(case)) if isinstance(size, property) else size)


@functools.cache
def _module(path: Path) -> ModuleType:
    """The file's module; its tests that ask for GPUs do not skip for want of them."""
    name = f"{_PACKAGE}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _as_with_gpus():
        spec.loader.exec_module(module)
    return module


@contextmanager
def _as_with_gpus() -> Iterator[None]:
    def unchanged(test: Any) -> Any:
        return test

    with ExitStack() as stack:
        for owner, name, value in (
            (common_distributed, "skip_if_lt_x_gpu", lambda *args, **kwargs: unchanged),
            (common_cuda, "TEST_CUDA", True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for older, newer in _OLDER_NAMES.items():
            if not hasattr(common_fsdp, older):
                value = getattr(common_fsdp, newer)
                stack.enter_context(mock.patch.object(common_fsdp, older, value, create=True))
        yield


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
            module, devices = _parts(name)[0], dist.get_world_size()
            stack.enter_context(cuda_as_cpu(DistributedDataParallel, module, devices))
        try:
            run(name)
        except unittest.SkipTest as reason:
            skipped = str(reason)
    return Done(skipped, dict(counts))


@functools.cache
def prepare(mode: str) -> None:
    """Once in a rank: import what the tests need, and keep what they print out of the table."""
    keep_quiet()
    for path in _files():
        _module(path)
    if mode != STOCK:
        _changes().follow()
    # Else each collection between two tests looks through all of PyTorch's modules.
    gc.freeze()


def _changes() -> ModuleType:
    """Imported only where something of ours takes part."""
    from tests.upstream_fsdp import changes

    return changes


CHANGED = "changed"

SUBJECT = Subject(
    title="fully_shard",
    names=names_of_tests,
    world_sizes=(2, 4),
    least_shares={CHANGED: 0.95},
    least_counted={2: 50, 4: 40}.get,
    known=KNOWN,
    left_out=LEFT_OUT,
    prepare=prepare,
    run=run_test,
    changed="changed",
    test_seconds=300.0,
)
NATIVE = replace(
    SUBJECT,
    names=names_of_gpu_tests,
    world_sizes=(2,),
    least_counted={2: 35, 4: 30}.get,
    backend="cpu:gloo,cuda:nccl",  # Some keep what they save on the CPU.
)
