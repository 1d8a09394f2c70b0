"""Runs the chains of many buckets at once: one bucket's operations in turn, buckets in parallel.

All ranks must issue the operations of one process group in the same order. A chain of one operation
is issued where the bucket becomes full, which gives that order. In a longer chain the second
operation can be issued only when the first is done. The training thread must not wait for it. Nor
may a thread of gloo's: gloo calls a future's callbacks in the thread that must do the work they
would wait for. So on CUDA a stream waits. On the CPU each later place in the chain has its own
thread, which takes the buckets in order.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bagua_client.communication.operations import Operation
from bagua_client.threads import TorchThread

HIGH_PRIORITY = -1

Arrival = torch.futures.Future[torch.Tensor]
"""Future of a bucket's flat tensor; completed when the tensor may be read."""


class Pipeline(Protocol):
    """Starts chains; buckets must be started in the same order on all ranks."""

    def start(
        self,
        flat: torch.Tensor,
        operations: Sequence[Operation],
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        """Start ``operations`` on ``flat``, one after the other.

        ``on_end`` is called from any thread when the last operation is done. On CUDA it is called
        before the device gets that far, with a current stream that waits for the end.
        """

    def gather(
        self,
        flat: torch.Tensor,
        arrivals: Sequence[Arrival],
        on_end: Callable[[], None] | None = None,
    ) -> Arrival:
        """Join ``arrivals``, those of the parts of ``flat``, to one arrival of ``flat``.

        ``on_end`` is called as in :meth:`start`, when all parts have arrived.
        """

    def close(self) -> None:
        """Release threads and streams; nothing may be in flight."""


def pipeline_for(device: torch.device) -> Pipeline:
    """The pipeline for buckets on ``device``."""
    return StreamPipeline(device) if device.type == "cuda" else ThreadPipeline()


def arrived(flat: torch.Tensor) -> Arrival:
    """An arrival that is already completed."""
    devices = [flat.device] if flat.device.type == "cuda" else []
    future: Arrival = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
    future.set_result(flat)
    return future


def _arrival_of(work: dist.Work, flat: torch.Tensor, on_end: Callable[[], None] | None) -> Arrival:
    """The arrival of ``flat`` when ``work``, a chain's only operation, ends; does not wait."""

    def end(done: torch.futures.Future[Any]) -> torch.Tensor:
        result = done.value()
        if on_end is not None:
            on_end()
        # The sum of sparse tensors is a new tensor; ``flat`` does not hold it.
        return flat if flat.layout is torch.strided else result[0]

    return work.get_future().then(end)


class _Chain:
    """A chain on its way through the threads."""

    def __init__(
        self, flat: torch.Tensor, operations: Sequence[Operation], on_end: Callable[[], None] | None
    ) -> None:
        self.flat = flat
        self.operations = operations
        self.on_end = on_end
        self.work = operations[0].start(flat)
        self.error: Exception | None = None
        self._ended: torch.futures.Future[None] = torch.futures.Future()
        # torch's reducer sees an exception that a callback raises, but not one that is set on a
        # Python future.
        self.arrival: Arrival = self._ended.then(lambda _: self._result())

    def _result(self) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return self.flat

    def advance(self, place: int) -> bool:
        """Wait for the operation before ``place``, then start the one at ``place``.

        Returns:
            Whether an operation was started; False: the chain has ended.
        """
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
        """End the chain where it is, because an earlier chain has failed at this place."""
        self.error = error
        self._ended.set_result(None)


class ThreadPipeline:
    """The pipeline for the CPU. A thread is started when the first chain needs it."""

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
                arrival.value()  # Raises the part's error, if it failed.
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
            run, stop = partial(self._relay, place, relay), partial(relay.put, None)
            TorchThread(run, f"bagua-relay-{place}", stop).start()
        return self._queues[place - 1]

    def _relay(self, place: int, chains: queue.SimpleQueue[_Chain | None]) -> None:
        error: Exception | None = None
        while True:
            chain = chains.get()
            if chain is None:
                return
            if error is not None:
                # Other ranks may be in the operation that this rank left out. A later one on the
                # same group would be matched with it; gloo ends a process if the sizes differ.
                chain.give_up(error)
            elif chain.advance(place):
                self._queue(place + 1).put(chain)
            else:
                error = chain.error
            # While the thread waits for the next chain, it must not keep this bucket's memory.
            del chain


class StreamPipeline:
    """The pipeline for one CUDA device: it issues each chain as a whole on a side stream, which
    waits for each operation.

    Side streams are used in turn, as many as a chain by node has operations: then the first
    operation of a bucket does not wait for the last operation of the bucket before it.

    Torch has 32 streams of each priority and hands them out in turn. NCCL's process groups get
    those of normal priority, and a channel whose side stream is another channel's group's would
    wait for that one; marks in a stream of normal priority also delayed the computation. So all of
    these have high priority, and eight channels, each with one more that waits, take 32.
    """

    STREAMS = 3

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
            # Issued in the current stream; another stream waits for its end.
            work = operations[0].start(flat)
            if work is not None and on_end is None:
                return _arrival_of(work, flat, None)  # Costs the host least.
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
        """The arrival that the reducer waits for: it completes when ``stream``, which waits for
        the last operation, gets there."""
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()
            if on_end is not None:
                on_end()
            return arrived(flat)

    def _waiting(self) -> torch.cuda.Stream:
        """A stream for what only waits."""
        if self._waiting_stream is None:
            self._waiting_stream = _stream(self._device)
        self._waiting_stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._waiting_stream

    def _next_stream(self) -> torch.cuda.Stream:
        if not self._streams:
            self._streams = [_stream(self._device) for _ in range(self.STREAMS)]
        self._started += 1
        return self._streams[self._started % self.STREAMS]

    def close(self) -> None:
        self._streams.clear()


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, HIGH_PRIORITY)  # type: ignore[no-untyped-call]
