"""When there is an agent at all; what it does is in tests/e2e."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.agent import correspondence, report
from bagua_client.communication import verdict
from tests.ranks import RankPool

DEFAULT = Configuration(first_bucket_bytes=2**20)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _wrap_with_autotune_on(ranks: list[int]) -> tuple[bool, list[str]]:
    verdict.ANSWER_SECONDS = 3.0
    os.environ["BAGUA_AUTOTUNE"] = str(int(dist.get_rank() in ranks))
    handler = _Lines()
    logger = logging.getLogger("bagua_client")
    logger.addHandler(handler)
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(1, 3)).sum().backward()
        return model.is_tuning, handler.lines
    finally:
        logger.removeHandler(handler)
        del os.environ["BAGUA_AUTOTUNE"]


def _wrap_as_another_release_on(rank: int) -> tuple[bool, list[str]]:
    own = report.FORMAT
    report.FORMAT += int(dist.get_rank() == rank)
    try:
        return _wrap_with_autotune_on(list(range(dist.get_world_size())))
    finally:
        report.FORMAT = own


def _tune_with_an_error_on_rank_0() -> tuple[bool, set[str], list[str]]:
    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    os.environ["BAGUA_AUTOTUNE"] = "1"
    handler = _Lines()
    logger = logging.getLogger("bagua_client")
    logger.addHandler(handler)
    describe_job = correspondence.describe_job
    correspondence.describe_job = fail  # type: ignore[assignment]
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        seen = set()
        for _ in range(20):
            model(torch.ones(1, 3)).sum().backward()
            seen.add(str(model.configuration))
        return model.is_tuning, seen, handler.lines
    finally:
        correspondence.describe_job = describe_job
        logger.removeHandler(handler)
        del os.environ["BAGUA_AUTOTUNE"]


def test_an_error_on_one_rank_ends_the_tuning_of_all_and_no_training(two_ranks: RankPool) -> None:
    for rank, (tunes, seen, lines) in enumerate(two_ranks.run(_tune_with_an_error_on_rank_0)):
        assert not tunes
        assert seen == {str(DEFAULT)}
        told = [line for line in lines if "can't start new thread" in line]
        assert lines == told
        assert len(told) == (rank == 0)
        assert all("on rank 0" in line for line in told)


def test_autotuning_that_is_on_for_some_ranks_only_is_off_for_all(two_ranks: RankPool) -> None:
    (first, lines), (second, silent) = two_ranks.run(_wrap_with_autotune_on, [0])
    assert (first, second) == (False, False)
    (line,) = lines
    assert "set both on all ranks" in line
    assert silent == []


@pytest.mark.slow
def test_ranks_of_different_releases_train_without_autotuning(three_ranks: RankPool) -> None:
    """Their reports differ in size, which gloo answers by ending the process."""
    for other in (0, 2):
        results = three_ranks.run(_wrap_as_another_release_on, other)
        assert [tunes for tunes, _ in results] == [False] * 3
        (line,) = [line for _, lines in results for line in lines]
        assert line.startswith("autotune is off")
        assert f"rank {other} has another release of bagua-autotune" in line
