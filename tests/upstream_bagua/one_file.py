"""Runs the tests of one of Bagua's test modules with unittest, which they were written for.

    python tests/upstream_bagua/one_file.py RESULTS MODULE [CLASS.TEST THAT IS LEFT OUT ...]

RESULTS gets a line of JSON for each test as soon as it has ended.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
import traceback
import unittest
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

FILE_STORES = ".bagua.*test*"
"""In /tmp, where the ranks of a test meet. One that was left by a test that failed tells the next
test's ranks of ranks that are gone, and they wait for those.
"""


class Recorder(unittest.TestResult):
    """Writes what becomes of each test."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self._started = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        for left in Path("/tmp").glob(FILE_STORES):
            left.unlink()
        self._started = time.monotonic()

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        for rank in multiprocessing.active_children():  # Stuck ones would hold the ports.
            rank.kill()
            rank.join()

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._failed(test, err)

    def _failed(self, test: unittest.TestCase, error: Any) -> None:
        traceback.print_exception(*error)
        self._write(test, "failed", "".join(traceback.format_exception_only(*error[:2])))

    def _write(self, test: unittest.TestCase, outcome: str, reason: str) -> None:
        line = {
            "test": "::".join(test.id().split(".")[-2:]),
            "outcome": outcome,
            "seconds": time.monotonic() - self._started,
            "reason": " ".join(reason.split())[:200],
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(results: str, module: str, *left_out: str) -> None:
    """Run them. They give their ranks a minute each, in which four of them need not end on two busy
    cores; what hangs is ended by who runs this."""
    process: Any = multiprocessing.process.BaseProcess
    join = process.join
    process.join = lambda rank, timeout=None: join(rank)
    loaded = unittest.defaultTestLoader.loadTestsFromName(module)
    unittest.TestSuite(_chosen(loaded, left_out)).run(Recorder(Path(results)))


def _chosen(suite: unittest.TestSuite, left_out: Collection[str]) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _chosen(test, left_out)
        elif not test.id().endswith(tuple(left_out)):
            yield test


if __name__ == "__main__":
    main(*sys.argv[1:])
