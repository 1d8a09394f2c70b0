"""A training over all hosts: one torchrun on each."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .host import Host
from .tools import before_others, dies_with_parent

POLL_SECONDS = 0.05
TERMINATE_SECONDS = 3.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job:
    """Starts at once.

    Args:
        script: a Python program and its arguments.
        environment: variables of the ranks, beside the hosts'.
        log: what the ranks print is added here; None: printed.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        ranks_per_node: int,
        script: Sequence[str],
        environment: Mapping[str, str],
        log: Path | None,
    ) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--nnodes", str(len(hosts)), "--nproc-per-node", str(ranks_per_node)]
        torchrun += ["--master-addr", hosts[0].address, "--master-port", str(free_port())]
        # The ranks must not outlive a torchrun that is killed; and they, not it, are in a hurry.
        rank = [*dies_with_parent(), *before_others(), sys.executable, "-u", *script]
        self._processes = []
        with contextlib.ExitStack() as files:
            output = None if log is None else files.enter_context(log.open("ab"))
            for node, host in enumerate(hosts):
                where = ["--node-rank", str(node), "--local-addr", host.address, "--no-python"]
                self._processes.append(
                    host.popen(
                        [*torchrun, *where, *rank],
                        environment,
                        stdout=output,
                        stderr=None if output is None else subprocess.STDOUT,
                    )
                )

    def wait(self, timeout_seconds: float | None = None) -> int:
        """The first exit code that is not 0; when one host fails, all are ended.

        Raises:
            TimeoutError: it took longer; the job has been ended.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            while True:
                codes = [process.poll() for process in self._processes]
                failed = [code for code in codes if code]
                if failed:
                    # As a shell says it: killed by signal 9 is 137.
                    return failed[0] if failed[0] > 0 else 128 - failed[0]
                if all(code == 0 for code in codes):
                    return 0
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"the job ran longer than {timeout_seconds:g} s")
                time.sleep(POLL_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all its processes: asked first, so that torchrun ends its ranks, then killed."""
        end(self._processes)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate all; kill those that are still there a little later."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
        if process.poll() is None:
            process.kill()
        with process:  # closes its pipes, and waits
            pass
