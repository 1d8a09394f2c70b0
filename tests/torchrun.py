"""Ranks with torchrun's environment, forked from one interpreter that has imported torch.

    python tests/torchrun.py RANKS PROGRAM ...
    python tests/torchrun.py RANKS -m MODULE ...

In torchrun's place where a test is of what the ranks do: importing torch, and what an optimizer's
first step imports, takes each of torchrun's own processes three CPU seconds. If one rank fails, the
others are ended.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

WORDS = str(Path(__file__)), "2"
COMMAND = [sys.executable, *WORDS]


def main(count: int, words: list[str]) -> int:
    import torch._dynamo
    import torch.distributed

    torch.set_num_threads(1)
    gc.freeze()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    pids = [_fork(rank, words) for rank in range(count)]

    def end_all(*_: object) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, end_all)
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status and not failed:
            failed = True
            end_all()
    return int(failed)


def _fork(rank: int, words: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 0
    try:
        _run(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # Without the interpreter's shutdown, in which torch aborts some processes: torch_aborts.py.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(words: list[str]) -> None:
    """As ``python WORDS`` would."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
