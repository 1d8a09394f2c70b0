"""PyTorch's test class, imported from the wheel into a rank and made to run a single test there."""

from __future__ import annotations

import functools
import importlib
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch.testing._internal import common_distributed

from tests.upstream.adjusted import adjusted_helpers, with_smaller_numbers
from tests.upstream.runner.in_a_rank import is_native
from tests.upstream.selection import SUITE

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
        common_distributed,
        skip_if_no_gpu=mark,
        skip_if_lt_x_gpu=lambda *args, **kwargs: mark,
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
