"""What is tested by PyTorch's own tests: what the command, the runner and the report are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

STOCK = "stock"
"""The mode in which nothing of ours takes part: what passes in it has to pass in the others."""


class Known(NamedTuple):
    """One known failure.

    Attributes:
        mode: in which it fails.
        test: its name.
        reason: a sentence.
        world_sizes: where it fails; with other numbers of ranks it must pass.
    """

    mode: str
    test: str
    reason: str
    world_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """A test that did not fail on this rank.

    Attributes:
        skipped: why, if it was.
        counts: of what the code under test did meanwhile, if it counts anything.
    """

    skipped: str | None
    counts: dict[str, int]


@dataclass(frozen=True)
class Subject:
    """One part of PyTorch and its tests.

    Attributes:
        title: what is tested, for the command's help.
        names: of the tests for a number of ranks.
        world_sizes: the usual numbers of ranks.
        least_shares: of the tests that pass in mode "stock" those that have to pass, by mode.
        least_counted: how many at least pass in mode "stock", for a number of ranks. Fewer say that
            the harness is broken, or PyTorch changed.
        known: tests that pass in mode "stock" and do not pass in another.
        left_out: tests that are not run, with the reasons.
        prepare: called once in each rank, with the mode: imports what takes long.
        run: called on each rank with a test's name and the mode.
        environment: variables of the ranks; the folder is theirs to write to.
        changed: the count, among those of a test, of changes made to what is tested.
        test_seconds: after which a test has failed.
        backend: of the ranks' process group; with NCCL, each has a GPU of its own.
    """

    title: str
    names: Callable[[int], Sequence[str]]
    world_sizes: Sequence[int]
    least_shares: Mapping[str, float]
    least_counted: Callable[[int], int]
    known: Sequence[Known]
    left_out: Mapping[str, str]
    prepare: Callable[[str], None]
    run: Callable[[str, str], Done]
    changed: str
    environment: Callable[[Path], Mapping[str, str]] = field(default=lambda folder: {})
    test_seconds: float = 40.0
    backend: str = "gloo"

    @property
    def is_native(self) -> bool:
        return "nccl" in self.backend

    @property
    def modes(self) -> tuple[str, ...]:
        return (STOCK, *self.least_shares)
