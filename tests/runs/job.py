"""A job for real runs: a speed that depends on two variables, a crash, a hang, and a process tree.

job.py FOLDER [HANGS_FROM]: notes each run, and the pids of all its processes, in FOLDER; from its
HANGS_FROM-th run on it prints nothing and hangs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
NOISE = (1.0, 0.99, 1.01, 1.0, 1.005, 0.995)


def main() -> None:
    folder = Path(sys.argv[1])
    number = len(list(folder.glob("run-*"))) + 1
    hangs = number >= int(sys.argv[2] if len(sys.argv) > 2 else 1000)
    _start_tree(folder, "STUBBORN" in os.environ and hangs)
    # Only now: one that is ended before has not all of its processes.
    (folder / f"run-{number}").touch()
    threads, buffers = (int(os.environ.get(name, "1")) for name in ("THREADS", "BUFFERS"))
    if buffers == 16:
        sys.exit("these buffers are too large")
    if threads == 8 or hangs:
        (folder / "hangs").touch()
        time.sleep(600)
    speed = 100 * {1: 1.0, 2: 1.2, 4: 1.5}[threads] * {1: 1.0, 4: 1.1, 8: 1.2}[buffers]
    print("Iteration 1:", speed / 10)
    print(f"Total img/sec on 2 GPU(s): {speed * NOISE[number % len(NOISE)]:.2f} +-1.0", flush=True)


def _start_tree(folder: Path, stubborn: bool) -> None:
    """A child in a session of its own, that may ignore SIGTERM, and one whose parent is gone."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", STUBBORN] if stubborn else
        ["sleep", "600"],
        start_new_session=True,
    )  # fmt: skip
    if os.fork() == 0:
        orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
        _note(folder, orphan.pid)
        os._exit(0)
    os.wait()
    _note(folder, child.pid)
    _note(folder, os.getpid())


def _note(folder: Path, pid: int) -> None:
    (folder / f"pid-{pid}").touch()


if __name__ == "__main__":
    main()
