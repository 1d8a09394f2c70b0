"""Threads of ours that call torch; each ends before the interpreter does.

CPython before 3.14 ends a daemon thread where it next asks for the interpreter. In a C++ call of
torch's (of a store, a group, a device) C++ then ends the process: a training that is finished would
be reported as failed. A thread that is no daemon could hold the exit up for ever.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

EXIT_SECONDS = 3.0
"""Longest time that the interpreter's exit waits for them, as a call of torch's may not return."""
AGAIN_SECONDS = 0.1


class TorchThread(threading.Thread):
    """A thread that may call torch.

    Args:
        run: what it does.
        name: its own.
        stop: has ``run`` return as soon as no call is under way, and make no other; it must not
            wait, and may be called twice.
    """

    def __init__(self, run: Callable[[], object], name: str, stop: Callable[[], object]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.stop = stop


@atexit.register
def _end_all() -> None:
    """Run last of what this package registers, whose other parts are imported later: goodbyes are
    said. A forked child has none of these threads."""
    deadline = time.monotonic() + EXIT_SECONDS
    while threads := [each for each in threading.enumerate() if isinstance(each, TorchThread)]:
        for thread in threads:
            thread.stop()
        threads[0].join(AGAIN_SECONDS)  # It may have begun another call.
        if time.monotonic() > deadline:
            return
