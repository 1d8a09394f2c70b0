"""What became of tests, and how that is written to a file: the table, the failures, and what in
them makes the run fail.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tests.upstream.runner.subject import STOCK, Subject

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


class Report:
    """Results, seen beside the failures that are known.

    Args:
        subject: what was tested.
        is_full: all tests ran, so that it means something how many pass.
    """

    def __init__(self, results: Sequence[Result], subject: Subject, is_full: bool) -> None:
        self._results = results
        self._subject = subject
        self._reasons = {
            (each.mode, each.test, ranks): each.reason
            for each in subject.known
            for ranks in each.world_sizes
        }
        self._is_full = is_full
        groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
        for result in results:
            groups[result.mode, result.world_size].append(result)
        self._groups = {
            group: groups[group]
            for group in sorted(groups, key=lambda group: (subject.modes.index(group[0]), group[1]))
        }

    def print(self) -> None:
        """The table, what does not pass with torch's class, other failures, where time went."""
        line = "{:<12} {:>5} {:>5} {:>8} {:>8} {:>8}"
        print(line.format("mode", "ranks", "ran", "passed", "percent", "seconds"))
        for (mode, world_size), members in self._groups.items():
            passed = _passed(members)
            share = "" if mode == STOCK else f"{passed / max(len(members), 1):.1%}"
            seconds = f"{sum(result.seconds for result in members):.0f}"
            print(line.format(mode, world_size, len(members), passed, share, seconds))
        self._print_changes()
        self._print_others("Not counted, as they do not pass in mode stock", [STOCK])
        self._print_others("Failures", list(self._subject.least_shares))
        print("\nSlowest")
        for result in sorted(self._results, key=lambda result: -result.seconds)[:8]:
            where = f"{result.mode}, {result.world_size} ranks"
            print(f"  {result.seconds:5.1f} s  {where}: {result.test}")

    def problems(self) -> Iterator[str]:
        """What makes the run fail, a line for each."""
        for mode, least in self._subject.least_shares.items() if self._is_full else ():
            ran = [r for (of, _), members in self._groups.items() if of == mode for r in members]
            passed, whole = _passed(ran), len(ran)
            if passed < least * whole:
                yield f"{mode}: {passed} of {whole} pass, fewer than {least:.0%}"
        for (mode, world_size), members in self._groups.items():
            passed = _passed(members)
            where = f"{mode}, {world_size} ranks"
            if self._is_full and mode == STOCK and passed < self._subject.least_counted(world_size):
                yield f"{where}: only {passed} tests pass"
            if mode != STOCK:
                yield from self._wrong_exceptions(where, members)

    def _print_changes(self) -> None:
        """So that nobody takes it for a change that passed when nothing was changed."""
        changed = self._subject.changed
        for (mode, world_size), members in self._groups.items():
            times = [result.counts[changed] for result in members if result.counts.get(changed)]
            if times:
                where = f"{mode}, {world_size} ranks"
                print(f"{where}: {changed} {sum(times)} times, in {len(times)} of the tests")

    def _wrong_exceptions(self, where: str, members: Sequence[Result]) -> Iterator[str]:
        unnamed = [
            result.test
            for result in members
            if result.outcome != PASSED and self._reason(result) is None
        ]
        passing = [
            result.test
            for result in members
            if result.outcome == PASSED and self._reason(result) is not None
        ]
        if unnamed:
            yield f"{where}: not among the exceptions: {', '.join(unnamed)}"
        if passing:
            yield f"{where}: pass, and are still among the exceptions: {', '.join(passing)}"

    def _reason(self, result: Result) -> str | None:
        return self._reasons.get((result.mode, result.test, result.world_size))

    def _print_others(self, title: str, modes: Collection[str]) -> None:
        others = [
            result
            for (mode, _), members in self._groups.items()
            for result in members
            if mode in modes and result.outcome != PASSED
        ]
        if others:
            print(f"\n{title}")
        for result in others:
            verb = "" if result.outcome == FAILED else f"{result.outcome}: "
            known = self._reason(result)
            print(
                f"  {result.mode}, {result.world_size} ranks: {result.test}: {verb}{result.reason}"
                + (f" (known: {known})" if known else "")
            )


def unknown_names(subject: Subject) -> Iterator[str]:
    """Exceptions that name no mode or no test, a line for each."""
    for each in subject.known:
        if each.mode not in subject.least_shares or not all(
            each.test in subject.names(world_size) for world_size in each.world_sizes
        ):
            yield f"the exceptions name {each.test} ({each.mode}), which there is not"


def _passed(results: Sequence[Result]) -> int:
    return sum(result.outcome == PASSED for result in results)
