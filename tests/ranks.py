"""Real rank processes for tests: started once, then given one function after the other.

Each rank is a process of its own with torchrun's environment and a process group, of gloo's over
loopback unless told otherwise. The test process stays outside, so that hypothesis can run there.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.testing.ranks import environments

START_SECONDS = 100.0
# Importing torch takes seconds, as does what an optimizer's first step imports. One process does
# so, and every rank is forked from it.
_FORK_SERVER = multiprocessing.get_context("forkserver")
_FORK_SERVER.set_forkserver_preload(["torch._dynamo", "bagua_client"])
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank.

    Attributes:
        result: what it returned.
        error: None, or the traceback, or how the process ended without one.
    """

    result: Any = None
    error: str | None = None


class RankFailure(AssertionError):
    """A rank raised, ended or hung; the text has the first failing rank's traceback."""


class RankPool:
    """Ranks on the given nodes; after a failure they are started anew for the next function.

    Args:
        ranks_per_node: ``[2, 1]`` is ranks 0 and 1 on node 0, rank 2 on node 1.
        collective_timeout_seconds: of the process group.
        variables: environment variables beyond torchrun's.
        spawned: each rank is an interpreter of its own, with a hash seed of its own, as under
            torchrun. Forked ranks share theirs, so that they all iterate over a set of strings in
            the same order: collectives in such an order would only go wrong in a real job. Costs
            seconds at the start.
        backend: of the process group. With NCCL each rank has the GPU of its number, and is best
            spawned: what imports torch may look for GPUs, and no GPU can be used in a process that
            was forked after that.
    """

    def __init__(
        self,
        ranks_per_node: Sequence[int],
        collective_timeout_seconds: float = 60.0,
        variables: Mapping[str, str] | None = None,
        spawned: bool = False,
        backend: str = "gloo",
    ) -> None:
        self._spawned = spawned
        self._backend = backend
        self._torchruns = environments(*ranks_per_node)
        self._collective_timeout = timedelta(seconds=collective_timeout_seconds)
        self._variables = dict(variables or {})
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._runs = 0
        self._in_use = threading.RLock()  # while a function runs

    @property
    def world_size(self) -> int:
        return len(self._torchruns)

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 300) -> Any:
        """The results of ``function(*args)`` on all ranks, by rank.

        Raises:
            RankFailure: a rank raised, ended, or had not returned after ``timeout_seconds``.
        """
        outcomes = self.outcomes(function, *args, timeout_seconds=timeout_seconds)
        for rank, outcome in outcomes.items():
            if outcome.error is not None:
                raise RankFailure(f"rank {rank} of {self.world_size}: {outcome.error}")
        return [outcomes[rank].result for rank in range(self.world_size)]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 300
    ) -> dict[int, Outcome]:
        """Like :meth:`run`, but failures are answered too; by rank, in the order of arrival.

        A rank whose function raises reports and ends, as it would in a training job.
        """
        with self._in_use:
            self._start()
            self._runs += 1
            for connection in self._connections:
                connection.send((f"{self._folder.name}/{self._runs}", function, args))
            outcomes = self._receive(timeout_seconds)
            if any(outcome.error is not None for outcome in outcomes.values()):
                self.close()
            for connection in self._connections:
                connection.send(None)  # All have returned, so that none is without the others.
            return outcomes

    def close(self) -> None:
        """End all ranks, by force. What another thread runs on them ends with a failure first."""
        for process in self._processes:
            process.kill()
        with self._in_use:
            for process in self._processes:
                process.join()
            for connection in self._connections:
                connection.close()
            self._processes, self._connections = [], []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def _start(self) -> None:
        if self._processes:
            return
        context: Any = _SPAWN if self._spawned else _FORK_SERVER
        for rank in range(self.world_size):
            connection, far_end = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(far_end, self._environment(rank), self._collective_timeout, self._backend),
                daemon=True,
                name=f"rank {rank} of {self.world_size}",
            )
            with _starting, _hash_seed(rank + 1):
                process.start()
            far_end.close()
            self._processes.append(process)
            self._connections.append(connection)
        for rank, outcome in self._receive(START_SECONDS).items():
            if outcome.error is not None:
                self.close()
                raise RankFailure(f"rank {rank} did not start: {outcome.error}")

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            **{name: os.environ[name] for name in os.environ if not name.startswith("BAGUA_")},
            **self._torchruns[rank],
            "OMP_NUM_THREADS": "1",
            **self._variables,
        }

    def _receive(self, timeout_seconds: float) -> dict[int, Outcome]:
        deadline = time.monotonic() + timeout_seconds
        outcomes: dict[int, Outcome] = {}
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        while len(outcomes) < self.world_size:
            left = [connection for connection in rank_of if rank_of[connection] not in outcomes]
            ready = wait(left, max(deadline - time.monotonic(), 0.0))
            if not ready:
                for connection in left:
                    error = f"had not answered after {timeout_seconds:g} s"
                    outcomes[rank_of[connection]] = Outcome(error=error)
            for answered in ready:
                assert isinstance(answered, Connection)
                outcomes[rank_of[answered]] = self._answer(rank_of[answered], answered)
        return outcomes

    def _answer(self, rank: int, connection: Connection) -> Outcome:
        try:
            outcome = connection.recv()
        except EOFError:
            self._processes[rank].join()
            return Outcome(error=f"ended with exit code {self._processes[rank].exitcode}")
        assert isinstance(outcome, Outcome)
        return outcome


_starting = threading.Lock()
"""The variable below is the whole process's, and pools may be started by several threads."""


@contextmanager
def _hash_seed(seed: int) -> Iterator[None]:
    """Of the interpreters that are started inside; it is read before any code of theirs runs."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = str(seed)
    try:
        yield
    finally:
        del os.environ["PYTHONHASHSEED"]
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before


def _serve(
    connection: Connection, environment: Mapping[str, str], timeout: timedelta, backend: str
) -> None:
    faulthandler.enable()  # A rank that is ended by a signal says where each thread was.
    torch.set_num_threads(1)
    gc.freeze()  # Torch's modules are 285,000 objects, which each collection would go through.
    home = os.getcwd()
    try:
        connection.send(Outcome())
        while True:
            store, function, args = connection.recv()
            os.environ.clear()  # Of the fork server's start, or what the last function has set.
            os.environ.update(environment)
            _join_group(backend, store, environment, timeout)
            torch.manual_seed(0)
            connection.send(Outcome(result=function(*args)))
            connection.recv()
            _leave_groups()
            os.chdir(home)  # A folder of the test's may be gone when the next function comes.
    except EOFError:
        pass  # The test process is gone.
    except BaseException:
        connection.send(Outcome(error=traceback.format_exc()))
    # Without the interpreter's shutdown: it would wait for collectives that never end.
    os._exit(1)


def _join_group(
    backend: str, store: str, environment: Mapping[str, str], timeout: timedelta
) -> None:
    """A process group for each function, met over the file ``store``."""
    if "nccl" in backend:
        torch.cuda.set_device(int(environment["RANK"]))
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        timeout=timeout,
    )
    # Gloo's groups are there when a rank has connected, whether or not the others have: a function
    # that leaves its group at once would close what they still connect to.
    dist.barrier()


def _leave_groups() -> None:
    """Each group that is left has a thread of gloo's that wakes 100 times a second."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # A group goes when its collectives have ended.
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
