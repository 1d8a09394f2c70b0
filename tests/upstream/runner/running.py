"""Runs tests on ranks that stay, one after the other; ranks start anew after a failure only."""

from __future__ import annotations

import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.ranks import Outcome, RankFailure, RankPool
from tests.upstream.runner.report import FAILED, PASSED, SKIPPED, Result, one_line
from tests.upstream.runner.subject import Subject

# By the process that ranks are forked from: what takes long to import.
_IMPORTED_ONCE = [
    "torch._inductor.compile_fx",
    "torch.distributed.optim",
    "torch.testing._internal.common_distributed",
]
# A collective without its peer ends first, so that the rank can say where it stood.
_COLLECTIVE_SECONDS = 20.0
# Of three ranks two share a node, so that buckets can also be reduced there first.
_NODES = {2: [2], 3: [2, 1]}
_START_SECONDS = 100.0
# What the others see when one rank has failed.
_AFTERMATH = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting")


def run_tests(
    subject: Subject,
    names: Iterable[str],
    mode: str,
    world_size: int,
    shows_output: bool = False,
    until: float = math.inf,
) -> Iterator[Result]:
    """Results of the tests, each as soon as it is known.

    Args:
        until: no test begins after that time of ``time.monotonic``.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        nodes = _NODES.get(world_size, [world_size])
        variables = {
            **subject.environment(Path(folder)),
            **({"UPSTREAM_OUTPUT": "shown"} if shows_output else {}),
            **(_of_gpus(world_size) if subject.is_native else {}),
        }
        pool = RankPool(
            nodes,
            _COLLECTIVE_SECONDS,
            variables,
            spawned=subject.is_native,
            backend=subject.backend,
        )
        try:
            for name in names:
                if time.monotonic() >= until:
                    return
                if name in subject.left_out:
                    yield Result(name, mode, world_size, SKIPPED, reason=subject.left_out[name])
                else:
                    yield _run_test(subject, pool, name, mode)
        finally:
            pool.close()


def _of_gpus(world_size: int) -> dict[str, str]:
    """For ranks that see as many GPUs as there are ranks, as the tests count them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = given.split(",") if given else [*map(str, range(world_size))]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible[:world_size]),
        # A rank whose collective has no peer ends then, not after it has written what it knows.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


def _run_test(subject: Subject, pool: RankPool, name: str, mode: str) -> Result:
    started = time.monotonic()
    try:
        if not pool.pids:
            pool.run(subject.prepare, mode, timeout_seconds=_START_SECONDS)
            started = time.monotonic()
        outcomes = pool.outcomes(subject.run, name, mode, timeout_seconds=subject.test_seconds)
    except RankFailure as failure:  # A rank did not start.
        outcomes = {0: Outcome(error=str(failure))}
    seconds = round(time.monotonic() - started, 2)
    error = _most_telling(outcomes)
    if error is not None:
        result = Result(name, mode, pool.world_size, FAILED, seconds, one_line(error), error)
    else:
        done = outcomes[0].result
        outcome = PASSED if done.skipped is None else SKIPPED
        reason = done.skipped or ""
        result = Result(name, mode, pool.world_size, outcome, seconds, reason, counts=done.counts)
    return result


def _most_telling(outcomes: Mapping[int, Outcome]) -> str | None:
    """The first rank's error that is no consequence of another's; in the order of arrival."""
    errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
    causes = [error for error in errors if not any(sign in error for sign in _AFTERMATH)]
    return next(iter(causes or errors), None)
