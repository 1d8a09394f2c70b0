"""Where a test does not run quite as PyTorch wrote it, beyond reading CUDA devices as the CPU; and
tests that pass with torch's class and are known not to pass with ours, each with its reason.

The run fails if a test fails that is not named here, and if one that is named here passes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.upstream.runner.in_a_rank import is_native
from tests.upstream.runner.subject import Known

LEFT_OUT_ON_GPUS = {
    "test_ddp_has_finalized": "ends by a timeout that NCCL's watchdog answers by killing the rank"
}
LEFT_OUT = {
    **LEFT_OUT_ON_GPUS,
    "test_ddp_device": "asks on which GPU tensors are",
    "test_ddp_logging_data_gpu": "asks for the device_ids, which a CPU module cannot have",
}
# Numbers in the code of tests and of their helpers; what they are for is said beside each.
_CONSTANTS: dict[str, dict[object, object]] = {
    # Width of layers and side of images, for convolutions that take minutes on a CPU; and by how
    # many steps ranks differ, each of which is tried in 40 settings.
    "test_ddp_uneven_inputs": {1000: 20, (2, 3, 10): (3,)},
    # Width of layers, for the streams of a GPU to come into each other's way.
    "_test_ddp_apply_optim_in_backward": {1024: 128},
    # Steps, for the same, and many more than any hook needs.
    "test_DistributedDataParallel_non_default_stream": {1000: 100},
    "_test_ddp_hook_parity": {100: 30},
    # Seconds in which the rank with other shapes waits in vain for the others.
    "test_ddp_model_diff_shape_across_ranks": {10: 1},
}
# All others run on GPUs as they are.
_SMALLER_ON_GPUS_TOO = {"test_ddp_uneven_inputs"}
# With a file as the meeting point tests also save and reload the model amid training. This one
# then diverges with torch's own class.
_WITHOUT_RELOADING = {"test_DistributedDataParallel"}


@contextmanager
def adjusted(name: str, suite: ModuleType) -> Iterator[None]:
    """What the test finds around it."""
    init_method = "env://" if name in _WITHOUT_RELOADING else suite.INIT_METHOD
    # The default backend would have a compiler make machine code, for 20 s; DistributedDataParallel
    # has to do with what comes before that.
    compiles = functools.partial(torch.compile, backend="eager")
    with (
        mock.patch.object(torch, "compile", compiles),
        mock.patch.object(suite, "INIT_METHOD", init_method),
    ):
        yield


def with_smaller_numbers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The test or helper, the same or with smaller numbers where it has large ones."""
    replaced = _CONSTANTS.get(name)
    if replaced is None or (is_native() and name not in _SMALLER_ON_GPUS_TOO):
        return function
    assert isinstance(function, types.FunctionType)
    constants = tuple(replaced.get(constant, constant) for constant in function.__code__.co_consts)
    return types.FunctionType(
        function.__code__.replace(co_consts=constants),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def adjusted_helpers(case_class: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Names and replacements of the helpers that have large numbers."""
    for name in _CONSTANTS:
        if not name.startswith("test"):
            yield name, with_smaller_numbers(name, getattr(case_class, name))


_ALL = (2, 3, 4)

_KNOWN_ANYWHERE: tuple[Known, ...] = (
    Known(
        "recut",
        "test_different_graph_across_ranks",
        "Asks whether the reducer has cut its buckets, which a new one does after its first step.",
        _ALL,
    ),
    Known(
        "recut",
        "test_skip_all_reduce_unused_parameters",
        "Counts the buckets of a wrapper that has other buckets here.",
        _ALL,
    ),
    Known(
        "recut",
        "test_ddp_profiling_autograd_profiler",
        "Counts all-reduces, and buckets that are reduced in each node first have others.",
        (3,),
    ),
    Known(
        "recut",
        "test_ddp_profiling_torch_profiler",
        "Counts all-reduces, and buckets that are reduced in each node first have others.",
        (3,),
    ),
)
_STATISTICS = "Reads torch's statistics of steps, which a new reducer begins anew."
KNOWN = (Known("recut", "test_ddp_logging_data_cpu", _STATISTICS, _ALL), *_KNOWN_ANYWHERE)
_VOTE = "Counts a step's collectives and waits, and ranks vote on a change, with an all-gather."
_MEETS = (
    "Torch's constructor fails on one rank, and the other goes on with NCCL; it then waits for the "
    "first where ranks meet to make groups, which this mode has them do at once."
)
KNOWN_ON_GPUS = (
    Known("recut", "test_ddp_model_diff_shape_across_ranks", _MEETS, (2,)),
    Known("recut", "test_ddp_logging_data_gpu", _STATISTICS, (2,)),
    Known("recut", "test_ddp_profiling_torch_profiler", _VOTE, (2,)),
    Known("recut", "test_ddp_profiling_execution_trace", _VOTE, (2,)),
    *_KNOWN_ANYWHERE,
)
