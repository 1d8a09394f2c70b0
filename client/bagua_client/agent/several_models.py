"""Turns: of the models of a job, whichever ranks train them, one is tuned at a time.

Each tuning disturbs the step times of the others. The first rank of each model asks for its turn. A
key in the store of the ranks' rendezvous names the process that has it; among its own models the
process passes it on itself. A thread asks the store, so that no training thread waits, and no
collective is needed, which the ranks of one model could not enter alone. Who has the turn renews it
while its model makes steps; from a process that renews it no longer the others take it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from bagua_client.threads import TorchThread
from bagua_client.torch_private import groups as torch_groups

logger = logging.getLogger(__name__)

KEY = "bagua/turn"
POLL_SECONDS = 1.0
LEASE_SECONDS = 30.0
"""A turn that was not renewed for so long is free: its process has ended, or hangs."""
IDLE_SECONDS = 60.0
"""A model that made no step for so long keeps the next one no longer waiting."""
IDLE_REDUCTIONS = 200
"""Reductions of the next model after which one that made no step loses its turn: it was made for
later, or is what a training has left behind. A GAN's and a reinforcement learner's models take
turns in fewer.
"""


class Turn:
    """One model's turn, on its first rank.

    Args:
        job: the name of the model's job.
        find: the turns of this process.
        clock: seconds.

    Attributes:
        idle_reductions: of this process's other models, since it asked last.
    """

    def __init__(
        self, job: str, find: Callable[[], Turns], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.job = job
        self._find = find
        self._clock = clock
        self._turns: Turns | None = None
        self._process = os.getpid()
        self._asked_at: float | None = None
        self._reductions = self.idle_reductions = 0

    @property
    def is_wanted(self) -> bool:
        """Whether the model waits to be tuned, or is being tuned, and makes steps."""
        if self._asked_at is None or self.idle_reductions > IDLE_REDUCTIONS:
            return False
        return self._clock() - self._asked_at < IDLE_SECONDS

    def take(self, reductions: int) -> bool:
        """Whether it is this model's turn; asks for it, and keeps it. Called often while the model
        makes steps, after so many reductions; never waits."""
        turns = self._joined()
        turns.others_made(self, reductions - self._reductions)
        self._asked_at, self._reductions, self.idle_reductions = self._clock(), reductions, 0
        return turns.current is self

    def leave(self) -> None:
        """The model is tuned: the next one may be."""
        self._asked_at = None
        if self._turns is not None:
            self._turns.pass_on()

    def close(self) -> None:
        """The model is gone, or will never be tuned again."""
        self._asked_at = None
        if self._turns is not None and os.getpid() == self._process:  # Locks are the parent's.
            self._turns.remove(self)

    @property
    def is_anothers(self) -> bool:
        """Whether another model is being tuned now."""
        return self._joined().is_taken_from(self)

    def _joined(self) -> Turns:
        if self._turns is None:
            self._turns = self._find()
            self._turns.add(self)
        return self._turns


class _Holder(NamedTuple):
    """The store's value. Each change has the next number, so that no two are alike."""

    number: int = 0
    process: str = ""
    job: str = ""


class Turns:
    """The turns of one process's models.

    Args:
        find_store: None: the job is over.
        clock: seconds.
    """

    def __init__(
        self,
        find_store: Callable[[], torch_groups.Store | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_store = find_store
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._turns: list[Turn] = []
        self._chosen: Turn | None = None
        self._is_ours = False
        self._seen, self._seen_at = b"", clock()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_over = False
        self._thread: TorchThread | None = None

    def add(self, turn: Turn) -> None:
        """Add a model that this process has begun to train."""
        with self._lock:
            self._turns.append(turn)
            if self._thread is None:
                self._thread = TorchThread(self._run, "bagua-turns", self.end)
                self._thread.start()

    def remove(self, turn: Turn) -> None:
        """Remove a model that is gone; one may end its tuning first, and be gone later."""
        with self._lock:
            if turn in self._turns:
                self._turns.remove(turn)
        self.pass_on()

    def end(self) -> None:
        """The job is over: the store is not asked any more."""
        self._is_over = True
        self._wake.set()

    def others_made(self, turn: Turn, reductions: int) -> None:
        """Count reductions of one model, in which the others stood still."""
        with self._lock:
            for each in self._turns:
                each.idle_reductions += 0 if each is turn else reductions

    @property
    def current(self) -> Turn | None:
        """Return the turn that runs, if it is of one of this process's models."""
        chosen = self._choose()
        return chosen if self._is_ours else None

    def is_taken_from(self, turn: Turn) -> bool:
        """Whether another model has it, here or in another process."""
        if self._choose() not in (None, turn):
            return True
        return not self._is_ours and bool(_read(self._seen).process) and not self._is_free

    @property
    def holder(self) -> str:
        """The name of the job that has it; empty: none has."""
        return "" if self._is_free else _read(self._seen).job

    def pass_on(self) -> None:
        """Pass the turn on: its model is done with it."""
        if self._choose() is None:
            self._wake.set()  # To give it back at once.

    def _choose(self) -> Turn | None:
        """The first that wants it, which then keeps it as long as it does."""
        with self._lock:
            before = self._chosen
            if before is None or before not in self._turns or not before.is_wanted:
                self._chosen = next((turn for turn in self._turns if turn.is_wanted), None)
                if self._chosen is not None:
                    self._wake.set()
            return self._chosen

    @property
    def _is_free(self) -> bool:
        is_expired = self._clock() - self._seen_at > LEASE_SECONDS
        return is_expired or not _read(self._seen).process

    def _run(self) -> None:
        try:
            while not self._is_over and (store := self._find_store()) is not None:
                self.look(store)
                del store  # Its server ends with its last reference.
                self._wake.wait(POLL_SECONDS)
                self._wake.clear()
                with self._lock:
                    if not self._turns and not self._is_ours:
                        self._thread = None
                        return
        except Exception as error:
            # Most likely the job ends. If not, tuning two models at once beats tuning none.
            logger.info(
                "autotune: the ranks' store cannot be read (%s); models of other ranks are no "
                "longer waited for",
                error,
            )
            self._is_ours = True

    def look(self, store: torch_groups.Store) -> None:
        """Take, renew or give back the turn, if that is possible; the thread does so regularly."""
        value = store.get(KEY) if store.check([KEY]) else b""
        if value != self._seen:
            self._seen, self._seen_at = value, self._clock()
        number, process, _ = _read(value)
        chosen, had = self._choose(), process == self._process
        if had or (chosen is not None and self._is_free):
            holder = _Holder(number + 1)
            if chosen is not None:
                holder = _Holder(number + 1, self._process, chosen.job)
            self._seen = store.compare_set(KEY, value.decode(), json.dumps(holder))
            self._seen_at = self._clock()
        self._is_ours = _read(self._seen).process == self._process


def _read(value: bytes) -> _Holder:
    return _Holder(*json.loads(value)) if value else _Holder()


_of_process: tuple[Any, Turns] | None = None


def turns() -> Turns:
    """The turns of this process's models; a job's models are those of one default group, or of the
    process that has none."""
    global _of_process
    world = dist.group.WORLD
    if _of_process is None or _of_process[0]() is not world:
        find_world = (lambda: None) if world is None else ref(world)

        def find_store() -> torch_groups.Store | None:
            return torch_groups.store() if dist.group.WORLD is find_world() else None

        found = Turns(find_store)
        torch_groups.when_destroyed(found.end)
        _of_process = find_world, found
    return _of_process[1]
