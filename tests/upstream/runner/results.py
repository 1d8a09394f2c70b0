"""What became of a test in one mode, and how it is written to a file."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Result:
    """One test in one mode.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        seconds: on the wall, without the start of ranks.
        reason: one line on why it failed or was skipped.
        error: the whole text of one rank's failure.
        counts: of what the class under test did on rank 0, if it counts anything.
    """

    test: str
    mode: str
    world_size: int
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    error: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)


class Record:
    """What is known so far, from several threads.

    Args:
        path: of a file that has it after each result, with the version of PyTorch that the tests
            are from.
    """

    def __init__(self, path: Path | None) -> None:
        self.results: list[Result] = []
        self._path = path
        self._changing = threading.Lock()
        self._write()

    def add(self, result: Result) -> None:
        with self._changing:
            self.results.append(result)
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        results = [asdict(result) for result in self.results]
        content = {"torch": torch.__version__, "results": results}
        written = self._path.with_name(f"{self._path.name}.part")
        written.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        written.replace(self._path)  # A run that is ended leaves a whole file.


def one_line(error: str, limit: int = 160) -> str:
    """What a traceback ends with: the exception and its message, cut to ``limit`` characters."""
    lines = [line for line in error.splitlines() if line.strip()]
    last_frame = max((i for i, line in enumerate(lines) if _is_frame(line)), default=-1)
    message = itertools.dropwhile(lambda line: line.startswith(" "), lines[last_frame + 1 :])
    text = " ".join(line.strip() for line in message)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _is_frame(line: str) -> bool:
    return re.match(r'\s+File ".*", line \d+', line) is not None
