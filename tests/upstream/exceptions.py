"""Tests that pass with torch's class and are known not to pass with ours, each with its reason.

The run fails if a test fails that is not named here, and if one that is named here passes.
"""

from __future__ import annotations

from tests.upstream.runner.subject import Known

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
