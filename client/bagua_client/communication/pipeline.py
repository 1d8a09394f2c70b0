"""Runs the chains of many buckets at once: a bucket's operations in turn, the buckets side by side.

Every rank must issue the operations of one process group in the same order. A chain of one
operation needs nothing for that: it is issued where the bucket became full. In a longer chain
the second operation can only be issued when the first is done; who waits for it must not be the
training thread, nor a thread of gloo's, whose futures call back in the thread that must do the
work waited for. On CUDA a stream waits; on the CPU a thread of ours for each later place in the
chain takes the buckets in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bagua_client.communication.operations import Operation

Arrival = torch.futures.Future[torch.Tensor]
"""Of a bucket: done when the flat tensor that it holds may be used."""


class Pipeline(Protocol):
    """Starts chains; buckets must be started in the same order on all ranks."""

    def start(
        self,
        flat: torch.Tensor,
        operations: Sequence[Operation],
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        """Start ``operations`` on ``flat``, one after the other.

        ``on_end`` is called once the last one is done, from any thread. On CUDA it is called
        ahead of the device, with a current stream that waits for the end.
        """

    def gather(
        self,
        flat: torch.Tensor,
        arrivals: Sequence[Arrival],
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        """Of ``flat``, whose parts' ``arrivals`` are."""

    def close(self) -> None:
        """Let go of threads; nothing may be in flight."""


def pipeline_for(device: torch.device) -> Pipeline:
    """The pipeline for buckets on ``device``."""
    return StreamPipeline(device) if device.type == "cuda" else ThreadPipeline()


def arrived(flat: torch.Tensor) -> Arrival:
    """What is done at once."""
    devices = [flat.device] if flat.device.type == "cuda" else []
    future: Arrival = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
    future.set_result(flat)
    return future


def _arrival_of(work: dist.Work, flat: torch.Tensor, on_end: Callable[[], None] | None) -> Arrival:
    """Without waiting: the end of a single operation."""

    def end(done: torch.futures.Future[Any]) -> torch.Tensor:
        result = done.value()
        if on_end is not None:
            on_end()
        # A sum of sparse tensors is another tensor than the one that was given.
        return flat if flat.layout is torch.strided else result[0]

    return work.get_future().then(end)


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
        self.error: Exception | None = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # An exception that a future is given is known to Python alone; one that a callback
        # raises reaches torch's reducer.
        self.arrival: Arrival = self._ended.then(lambda _: self._result())

    def _result(self) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.flat

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
        except Exception as error:
            self.error = error
        self._ended.set_result(None)
        return False

    def give_up(self, error: Exception) -> None:
        """End where it is: one before it has failed there."""
        self.error = error
        self._ended.set_result(None)


class ThreadPipeline:
    """For the CPU. Threads are made when the first chain that needs them comes."""

    def __init__(self) -> None:
        self._queues: list[queue.SimpleQueue[_Chain | None]] = []

    def start(
        self,
        flat: torch.Tensor,
        operations: Sequence[Operation],
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        if len(operations) > 1:
            chain = _Chain(flat, operations, on_end)
            self._queue(1).put(chain)
            return chain.arrival
        work = operations[0].start(flat)
        if work is not None:
            return _arrival_of(work, flat, on_end)
        if on_end is not None:
            on_end()
        return arrived(flat)

    def gather(
        self,
        flat: torch.Tensor,
        arrivals: Sequence[Arrival],
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        def end(done: torch.futures.Future[list[Arrival]]) -> torch.Tensor:
            for arrival in done.value():
                arrival.value()  # Raises what went wrong on its way.
            if on_end is not None:
                on_end()
            return flat

        return torch.futures.collect_all(list(arrivals)).then(end)

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
        error: Exception | None = None
        while True:
            chain = chains.get()
            if chain is None:
                return
            if error is not None:
                # Other ranks may be at the operation that was left out: on the same group a later
                # one would meet it, and gloo ends a process whose peer sends another size.
                chain.give_up(error)
            elif chain.advance(place):
                self._queue(place + 1).put(chain)
            else:
                error = chain.error
            # While this thread waits for the next, it must not hold on to a bucket's memory.
            del chain


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
    ) -> Arrival:
        if len(operations) == 1:
            # Where the bucket became full; only its end is waited for elsewhere.
            work = operations[0].start(flat)
            if work is not None and on_end is None:
                return _arrival_of(work, flat, None)  # The least work for the host.
            return self._finish(self._waiting(), flat, work, on_end)
        stream = self._next_stream()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work = None
            for operation in operations:
                if work is not None:
                    work.wait()
                work = operation.start(flat)
        return self._finish(stream, flat, work, on_end)

    def gather(
        self,
        flat: torch.Tensor,
        arrivals: Sequence[Arrival],
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        with torch.cuda.stream(self._waiting()):
            for arrival in arrivals:
                arrival.wait()
            if on_end is not None:
                on_end()
            return arrived(flat)

    def _finish(
        self,
        stream: torch.cuda.Stream,
        flat: torch.Tensor,
        work: dist.Work | None,
        on_end: Callable[[], None] | None,
    ) -> Arrival:
        """What the reducer waits for: ``stream``, which waits for the last operation."""
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()
            if on_end is not None:
                on_end()
            return arrived(flat)

    def _waiting(self) -> torch.cuda.Stream:
        """A stream that comes first: marks in one like the others held the computation up."""
        if self._waiting_stream is None:
            self._waiting_stream = _stream(self._device, priority=-1)
        self._waiting_stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._waiting_stream

    def _next_stream(self) -> torch.cuda.Stream:
        if not self._streams:
            self._streams = [_stream(self._device) for _ in range(self.STREAMS)]
        self._started += 1
        return self._streams[self._started % self.STREAMS]

    def close(self) -> None:
        self._streams.clear()


def _stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
