"""Whether a run ended because there was no memory left, as far as that can be told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

# Behind the error of one rank torchrun and the other ranks may print a lot.
LAST_LINES = 300
MOST_CHARACTERS = 160

# Of torchrun's ranks.
_PREFIX = re.compile(r"^\[[^\]]*rank ?\d+\]: ?", re.IGNORECASE)
# torch on a GPU; CUDA by itself, and NCCL; torch on a CPU; Python; C++; the system.
_SAID = re.compile(
    r"OutOfMemoryError:|CUDA out of memory|(?:CUDA|Cuda) (?:error|failure).*out of memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|^\S*MemoryError\b"
    r"|std::bad_alloc|Cannot allocate memory",
)
# Of the run itself, and what torchrun says of a rank.
_KILLED = re.compile(r"exitcode *: *-9\b|Signal 9 \(SIGKILL\)|exit code:? -9\b")
SIGKILL_CODES = (-9, 128 + 9)


def kills_of_the_system() -> int:
    """How many processes this machine's kernel has killed for lack of memory so far; 0 if it does
    not say that (Linux: ``oom_kill`` in /proc/vmstat)."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def lack_of_memory(lines: Sequence[str], exit_code: int | None, kills: int) -> str:
    """Return how a failed run said that it had no memory left; empty: it did not.

    Args:
        lines: of its output.
        exit_code: of the run, below 0 for a signal; None: it was still running.
        kills: how many processes the kernel has killed for lack of memory since it began.
    """
    last = [_PREFIX.sub("", line.strip()) for line in lines[-LAST_LINES:]]
    said = [line for line in last if _SAID.search(line)]
    if said:
        return said[-1][:MOST_CHARACTERS]
    is_killed = exit_code in SIGKILL_CODES or any(map(_KILLED.search, last))
    return "killed by the kernel for lack of memory" if kills > 0 and is_killed else ""
