"""Runs the chains of many buckets at once: a bucket's operations in turn, the buckets side by side.

Every rank must issue the operations of one process group in the same order. A chain of one
operation needs nothing for that: it is issued where the bucket became full. In a longer chain
the second operation can only be issued when the first is done; who waits for it must not be the
training thread. On CUDA a stream waits; on the CPU a thread for each later place in the chain
takes the buckets in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from bagua_client.communication.operations import Operation


class Completion(Protocol):
    """What a started chain is waited for by (``torch.distributed.Work`` is one)."""

    def wait(self) -> object:
        """Return when the result may be used; raise what an operation raised."""


class Pipeline(Protocol):
    """Starts chains; buckets must be started in the same order on all ranks."""

    def start(
        self,
        flat: torch.Tensor,
        operations: Sequence[Operation],
        on_end: Callable[[], None] | None = None,
    ) -> Completion:
        """Start ``operations`` on ``flat``, one after the other.

        ``on_end`` is called once the last one is done, from any thread. On CUDA it is called
        ahead of the device, with a current stream that waits for the end.
        """

    def close(self) -> None:
        """Let go of threads; nothing may be in flight."""


def pipeline_for(device: torch.device) -> Pipeline:
    """The pipeline for buckets on ``device``."""
    return StreamPipeline(device) if device.type == "cuda" else ThreadPipeline()


class Done:
    """The completion of a chain that was done at once."""

    def wait(self) -> None:
        return


def _call_at_end(work: dist.Work | None, on_end: Callable[[], None]) -> None:
    if work is None:
        on_end()
        return
    try:
        future = work.get_future()
    except Exception:
        return  # A backend without futures: its ends are not known.
    future.add_done_callback(lambda _: on_end())


class _Chain:
    """A chain on its way through the threads."""

    def __init__(
        self,
        flat: torch.Tensor,
        operations: Sequence[Operation],
        on_end: Callable[[], None] | None,
    ) -> None:
        self.flat = flat
        self.operations = operations
        self.on_end = on_end
        self.work = operations[0].start(flat)
        self.error: BaseException | None = None
        self._ended = threading.Event()

    def advance(self, place: int) -> bool:
        """Wait for the operation before ``place`` and start the one there; False at the end."""
        try:
            if self.work is not None:
                self.work.wait()
            if place < len(self.operations):
                self.work = self.operations[place].start(self.flat)
                return True
            if self.on_end is not None:
                self.on_end()
        except BaseException as error:
            self.error = error
        self._ended.set()
        return False

    def wait(self) -> None:
        self._ended.wait()
        if self.error is not None:
            raise self.error


class ThreadPipeline:
    """For the CPU. Threads are made when the first chain that needs them comes."""

    def __init__(self) -> None:
        self._queues: list[queue.SimpleQueue[_Chain | None]] = []

    def start(
        self,
        flat: torch.Tensor,
        operations: Sequence[Operation],
        on_end: Callable[[], None] | None = None,
    ) -> Completion:
        if len(operations) == 1:
            work = operations[0].start(flat)
            if on_end is not None:
                _call_at_end(work, on_end)
            return work or Done()
        chain = _Chain(flat, operations, on_end)
        self._queue(1).put(chain)
        return chain

    def close(self) -> None:
        for relay in self._queues:
            relay.put(None)
        self._queues.clear()

    def _queue(self, place: int) -> queue.SimpleQueue[_Chain | None]:
        if len(self._queues) < place:
            relay: queue.SimpleQueue[_Chain | None] = queue.SimpleQueue()
            self._queues.append(relay)
            threading.Thread(
                target=self._relay, args=(place, relay), name=f"bagua-relay-{place}", daemon=True
            ).start()
        return self._queues[place - 1]

    def _relay(self, place: int, chains: queue.SimpleQueue[_Chain | None]) -> None:
        while True:
            chain = chains.get()
            if chain is None:
                return
            if chain.advance(place):
                self._queue(place + 1).put(chain)
            # While this thread waits for the next, it must not hold on to a bucket's memory.
            del chain


class _StreamCompletion:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class StreamPipeline:
    """For one CUDA device: a chain is issued whole on a side stream, which does the waiting.

    Side streams are used in turn, so that the first operation of a bucket does not wait for the
    last one of the bucket before it.
    """

    STREAMS = 4

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        self._waiting_stream: torch.cuda.Stream | None = None
        self._started = 0

    def start(
        self,
        flat: torch.Tensor,
        operations: Sequence[Operation],
        on_end: Callable[[], None] | None = None,
    ) -> Completion:
        if len(operations) == 1:
            work = operations[0].start(flat)
            if on_end is not None:
                self._call_at_end(work, on_end)
            return work or Done()
        if not self._streams:
            self._streams = [_stream(self._device) for _ in range(self.STREAMS)]
        stream = self._streams[self._started % self.STREAMS]
        self._started += 1
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for operation in operations:
                work = operation.start(flat)
                if work is not None:
                    work.wait()
            if on_end is not None:
                on_end()
            return _StreamCompletion(stream.record_event(), self._device)

    def _call_at_end(self, work: dist.Work | None, on_end: Callable[[], None]) -> None:
        """In a stream of its own, which comes first: marks in those that torch's futures call back
        in, or in one like the others, held the computation up for longer."""
        if self._waiting_stream is None:
            self._waiting_stream = _stream(self._device, priority=-1)
        if work is None:
            self._waiting_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._waiting_stream):
            if work is not None:
                work.wait()
            on_end()

    def close(self) -> None:
        self._streams.clear()


def _stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
