"""The tests of DistributedDataParallel, with torch's class, ours, and ours being re-cut: PyTorch's
test class, imported from the wheel into a rank and made to run a single test there.
"""

from __future__ import annotations

import functools
import gc
import importlib
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch.testing._internal import common_distributed

from tests.upstream.classes import OURS, RECUT, class_of, counts_of, standing_in
from tests.upstream.exceptions import (
    KNOWN,
    KNOWN_ON_GPUS,
    LEFT_OUT,
    LEFT_OUT_ON_GPUS,
    adjusted,
    adjusted_helpers,
    with_smaller_numbers,
)
from tests.upstream.runner.cuda_as_cpu import cuda_as_cpu
from tests.upstream.runner.in_a_rank import is_native, keep_quiet, undone
from tests.upstream.runner.subject import Done, Subject
from tests.upstream.selection import SUITE, names_of_gpu_tests, names_of_tests

_Test = TypeVar("_Test", bound=Callable[..., Any])
_GPU_MARK = "_asks_for_gpu"
_PASSED_OVER = ("github.com/pytorch", "flak", "fail")


@functools.cache
def module() -> ModuleType:
    """The module of tests; without GPUs, those that ask for some are marked and do not skip.

    It reads ``BACKEND`` and ``WORLD_SIZE`` from the environment while it is imported.
    """

    def mark(test: _Test) -> _Test:
        setattr(test, _GPU_MARK, True)
        return test

    if is_native():
        return importlib.import_module(SUITE)
    with mock.patch.multiple(
        common_distributed, skip_if_no_gpu=mark, skip_if_lt_x_gpu=lambda *args, **kwargs: mark
    ):
        return importlib.import_module(SUITE)


@functools.cache
def _case_class() -> type[unittest.TestCase]:
    tests = module()

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore
        # The tests' own barrier polls files with sleeps of 0.1 s.
        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            dist.barrier()

    for name, helper in adjusted_helpers(Case):
        setattr(Case, name, helper)
    return Case


def asks_for_gpu(name: str) -> bool:
    return any(hasattr(layer, _GPU_MARK) for layer in _layers(name))


def run(name: str) -> None:
    """The body of the test, on this rank, in the process group that is there.

    Raises:
        unittest.SkipTest: it does not apply to this backend or number of ranks.
    """
    case: Any = _case_class()(name)
    case.rank = dist.get_rank()
    try:
        _body(name)(case)
    except SystemExit as skipped:  # The way out of those of PyTorch's decorators that skip.
        raise unittest.SkipTest(_reason(skipped.code)) from None


def _layers(name: str) -> Iterator[Callable[..., Any]]:
    """The test as decorated, then without its outermost decorator, and so on."""
    layer: Callable[..., Any] | None = getattr(_case_class(), name)
    while layer is not None:
        yield layer
        layer = getattr(layer, "__wrapped__", None)


def _body(name: str) -> Callable[..., Any]:
    """The test without the marks by which PyTorch's own CI passes over a flaky one."""
    for layer in _layers(name):
        why = getattr(layer, "__unittest_skip_why__", None)
        if why is not None and not any(word in why for word in _PASSED_OVER):
            raise unittest.SkipTest(why)
        if layer.__code__.co_name != "skip_wrapper":
            return with_smaller_numbers(name, layer)
    raise LookupError(name)


def _reason(exit_code: object) -> str:
    for skip in common_distributed.TEST_SKIPS.values():
        if skip.exit_code == exit_code:
            return str(skip.message)
    return f"exit code {exit_code}"


def run_test(name: str, mode: str) -> Done:
    """Runs the test on this rank; raises what the test raises."""
    prepare(mode)
    tested_class = class_of(mode, name)
    before = counts_of(mode)
    skipped = None
    with ExitStack() as stack:
        stack.enter_context(undone())
        stack.enter_context(standing_in(tested_class))
        stack.enter_context(adjusted(name, module()))
        if not is_native() and asks_for_gpu(name):
            stack.enter_context(cuda_as_cpu(tested_class, module()))
        try:
            run(name)
        except unittest.SkipTest as reason:
            skipped = str(reason)
    return Done(skipped, dict(counts_of(mode) - before))


@functools.cache
def prepare(mode: str) -> None:
    """Once in a rank: import what the tests need, and keep what they print out of the table."""
    keep_quiet()
    module()
    class_of(mode)
    # Else each collection between two tests looks through all of PyTorch's modules.
    gc.freeze()


def _environment(folder: Path) -> dict[str, str]:
    """What PyTorch's runner sets for these tests."""
    return {
        "BACKEND": "gloo",
        "TEMP_DIR": str(folder),
        "INIT_METHOD": f"file://{folder}/init",
        # A test of saved communication hooks is older than PyTorch's safe loading.
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }


def _on_gpus(folder: Path) -> dict[str, str]:
    return {**_environment(folder), "BACKEND": "nccl"}


SUBJECT = Subject(
    title="DistributedDataParallel",
    names=lambda world_size: names_of_tests(),
    world_sizes=(2, 3),
    least_shares={OURS: 0.99, RECUT: 0.95},
    least_counted=lambda world_size: 90,
    known=KNOWN,
    left_out=LEFT_OUT,
    prepare=prepare,
    run=run_test,
    changed="recut",
    environment=_environment,
)
NATIVE = replace(
    SUBJECT,
    names=lambda world_size: names_of_gpu_tests(),
    world_sizes=(2,),
    least_counted=lambda world_size: 60,
    known=KNOWN_ON_GPUS,
    left_out=LEFT_OUT_ON_GPUS,
    environment=_on_gpus,
    backend="nccl",
)
