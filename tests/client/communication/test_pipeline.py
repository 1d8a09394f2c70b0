"""The threads that run chains of operations on the CPU, and the streams that do on a GPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.communication import pipeline as module
from bagua_client.communication.pipeline import StreamPipeline, ThreadPipeline


class Work:
    """Something to wait for that ends when the test says so, well or badly."""

    def __init__(self, gate: threading.Event, error: Exception | None = None) -> None:
        self._gate = gate
        self._error = error

    def wait(self) -> None:
        self._gate.wait()
        if self._error is not None:
            raise self._error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([])
        return future


class Note:
    """An operation that writes down that it was started."""

    def __init__(
        self, log: list[tuple[int, int]], bucket: int, place: int, work: Work | None = None
    ) -> None:
        self._log = log
        self._mark = (bucket, place)
        self._work = work

    def start(self, flat: torch.Tensor) -> Work | None:
        self._log.append(self._mark)
        flat.add_(10 ** self._mark[1])
        return self._work


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=12))
def test_each_place_sees_the_buckets_in_the_order_of_their_start(lengths: Sequence[int]) -> None:
    pipeline = ThreadPipeline()
    log: list[tuple[int, int]] = []
    flats = [torch.zeros(1) for _ in lengths]
    completions = [
        pipeline.start(flat, [Note(log, bucket, place) for place in range(length)])
        for bucket, (flat, length) in enumerate(zip(flats, lengths, strict=True))
    ]
    for completion in completions:
        completion.wait()
    pipeline.close()

    for place in range(max(lengths)):
        expected = [bucket for bucket, length in enumerate(lengths) if place < length]
        assert [bucket for bucket, at in log if at == place] == expected
    for bucket, length in enumerate(lengths):
        assert [place for at, place in log if at == bucket] == list(range(length))
    assert [int(flat.item()) for flat in flats] == [int("1" * length) for length in lengths]


def test_starting_never_waits_and_the_second_operation_waits_for_the_first() -> None:
    pipeline = ThreadPipeline()
    gate = threading.Event()
    log: list[tuple[int, int]] = []
    completion = pipeline.start(torch.zeros(1), [Note(log, 0, 0, Work(gate)), Note(log, 0, 1)])
    assert log == [(0, 0)]
    gate.set()
    completion.wait()
    assert log == [(0, 0), (0, 1)]
    pipeline.close()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_error_of_an_operation_ends_its_chain_and_those_behind_it(place: int) -> None:
    """On a group that another rank still waits in, no later operation may be started."""
    pipeline = ThreadPipeline()
    gate = threading.Event()
    gate.set()
    log: list[tuple[int, int]] = []
    failed = Work(gate, RuntimeError("connection closed by peer"))
    works = [failed if at == place else None for at in range(3)]
    broken = pipeline.start(torch.zeros(1), [Note(log, 0, at, works[at]) for at in range(3)])
    behind = pipeline.start(torch.zeros(1), [Note(log, 1, at) for at in range(3)])
    for arrival in (broken, behind):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            arrival.wait()
    pipeline.close()
    for found in (0, 1):
        assert [at for bucket, at in log if bucket == found] == list(range(place + 1))


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    pipeline = ThreadPipeline()
    pipeline.start(torch.zeros(1), [Note([], 0, place) for place in range(3)]).wait()
    relays = set(threading.enumerate()) - before
    assert relays
    pipeline.close()
    for relay in relays:
        relay.join(timeout=60)
        assert not relay.is_alive()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_end_of_a_chain_is_told_once_when_its_last_operation_is_done(length: int) -> None:
    pipeline = ThreadPipeline()
    gate = threading.Event()
    log: list[tuple[int, int]] = []
    ends: list[int] = []
    operations = [Note(log, 0, place) for place in range(length)]
    if length > 1:
        operations[-2] = Note(log, 0, length - 2, Work(gate))
    completion = pipeline.start(torch.zeros(1), operations, lambda: ends.append(len(log)))
    if length > 1:
        assert ends == []
    gate.set()
    completion.wait()
    assert ends == [length]
    pipeline.close()


def test_streams_of_eight_channels_are_no_process_groups_and_no_other_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the two that share a stream wait for each other."""
    taken: Counter[int] = Counter()

    def of_the_pool(device: torch.device, priority: int) -> tuple[int, int]:
        # As torch does: 32 of each priority, in turn.
        taken[priority] += 1
        return priority, taken[priority] % 32

    monkeypatch.setattr(module.torch.cuda, "Stream", of_the_pool)
    channels = [StreamPipeline(torch.device("cuda", 0)) for _ in range(8)]
    # One more for each, which waits for what has one operation, and for all parts of a bucket.
    used: list[Any] = [module._stream(torch.device("cuda", 0)) for _ in channels]
    used += [each._next_stream() for each in channels for _ in range(StreamPipeline.STREAMS)]
    assert len(set(used)) == len(used)
    assert {priority for priority, _ in used} == {module.HIGH_PRIORITY}
