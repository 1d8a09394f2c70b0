"""A training over all hosts, one torchrun on each; what a started process says, and its end:
neither is waited for without limit.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .host import Host
from .tools import dies_with_parent

START_SECONDS = 30.0
TERMINATE_SECONDS = 3.0


class ProcessError(Exception):
    """A process ended, or was killed, before it said what it was to say.

    The text begins with a verb, such as ``ended with exit code 1: no such file``; what it wrote
    to a piped stderr is in it.
    """


def read_line(
    process: subprocess.Popen[bytes], timeout_seconds: float | None = START_SECONDS
) -> str:
    """The next line of its piped stdout.

    Args:
        timeout_seconds: then it is killed; None: it is trusted to speak or end.

    Raises:
        ProcessError: there was none; the process is gone.
    """
    assert process.stdout is not None
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not selector.select(left):
                raise ProcessError(f"said nothing for {timeout_seconds:g} s{_killed(process)}")
            # One at a time: what follows the line stays in the pipe.
            byte = os.read(process.stdout.fileno(), 1)
            if not byte:
                reason = _killed(process)
                raise ProcessError(f"ended with exit code {process.returncode}{reason}")
            line += byte
    return line.decode().strip()


def _killed(process: subprocess.Popen[bytes]) -> str:
    """See that it is gone; what it wrote to its stderr, if that is a pipe, after a colon."""
    try:
        process.wait(TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    reason = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
    return f": {reason}" if reason else ""


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


POLL_SECONDS = 0.05
LISTENERS_PORTS = (20_000, 32_000)
MOST_PORTS_TRIED = 100
STDERR = 2


def free_port() -> int:
    """For a listener, and below those that connections get by themselves: which of these are taken
    in a host's namespace cannot be seen from here."""
    for _ in range(MOST_PORTS_TRIED):
        port = random.randint(*LISTENERS_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port between {LISTENERS_PORTS[0]} and {LISTENERS_PORTS[1]} is free")


class Job:
    """Starts at once.

    Args:
        script: a Python program and its arguments.
        environment: variables of the ranks, beside the hosts'.
        log: what the ranks print is added here; None: to our stderr.
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
        self._processes = []
        with contextlib.ExitStack() as files:
            output = STDERR if log is None else files.enter_context(log.open("ab"))
            for node, host in enumerate(hosts):
                where = ["--node-rank", str(node), "--local-addr", host.address, "--no-python"]
                # Ranks must not outlive a torchrun that is killed; they, not it, are in a hurry.
                rank = [*dies_with_parent(), *host.priority, sys.executable, "-u", *script]
                command = [*torchrun, *where, *rank]
                self._processes.append(
                    host.popen(command, environment, stdout=output, stderr=subprocess.STDOUT)
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
