"""What every kind of model keeps that is changed from one step to the next, as tests for pytest:
all ranks change together or not at all, and numbers are those of a model that nobody changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist

from bagua_client.configuration import Configuration
from bagua_client.testing.ranks import Ranks, kept_ranks
from bagua_wire.knobs import KNOBS


class TunedTraining(Protocol):
    """A model of one kind and its optimizer, which train alike each time they are made.

    Attributes:
        model: which ours may change by ``reconfigure``, if it was made so.
        tolerance: by what part numbers may be off, where sums are made in another order.
    """

    model: Any
    tolerance: float

    def step(self, number: int) -> float:
        """Make a step, with a batch of this rank's own; its loss."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Weights, and what else must be the same."""

    def trouble(self, place: str) -> AbstractContextManager[Any]:
        """A context in which the next change fails on this rank, at a place of its code."""

    def end(self) -> None:
        """Let go of what was made."""


@dataclass(frozen=True)
class Lost:
    """A change that fails on one rank.

    Attributes:
        change: by knob.
        place: see :meth:`TunedTraining.trouble`.
        is_begun: all ranks have agreed on the change and begun it.
        earlier: what is in force before.
    """

    change: Mapping[str, Any]
    place: str
    rank: int = 1
    is_begun: bool = True
    earlier: Mapping[str, Any] = field(default_factory=dict)


class _Asked:
    """A training that is changed by hand, and how the changes went."""

    def __init__(self, make: Callable[[bool], TunedTraining], is_tuned: bool = True) -> None:
        self._training = make(is_tuned)
        self.losses = [self._training.step(0)]
        self.trouble = self._training.trouble

    @property
    def default(self) -> Configuration:
        """As it is once ours has looked at the model, which is when a change is asked for first."""
        found: Configuration = self._training.model.tuning.default
        return found

    def ask(self, **changes: Any) -> bool:
        return bool(self._training.model.reconfigure(replace(self.default, **changes)))

    def train(self, until: int) -> None:
        steps = range(len(self.losses), until)
        self.losses += [self._training.step(number) for number in steps]

    def now(self) -> str:
        return str(self._training.model.configuration)

    def end(self) -> tuple[list[float], Mapping[str, torch.Tensor]]:
        """Its losses, and its state at last."""
        found = self._training.state()
        self._training.end()
        return self.losses, found

    def differs_from(self, other: tuple[list[float], Mapping[str, torch.Tensor]]) -> str:
        """In what, now that it ends."""
        losses, state = self.end()
        off = self._training.tolerance
        if not torch.allclose(torch.tensor(losses), torch.tensor(other[0]), off, off):
            return f"losses {losses} instead of {other[0]}"
        pairs = [(name, state[name], expected) for name, expected in other[1].items()]
        return ", ".join(name for name, one, two in pairs if not torch.allclose(one, two, off, off))


class _Lines(logging.Handler):
    """What the client warns of."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("bagua_client").addHandler(self)
        return self.lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.lines.append(record.getMessage())

    def __exit__(self, *_: object) -> None:
        logging.getLogger("bagua_client").removeHandler(self)


CHANGED_AT, FAILS_AT, AGAIN_AT, BACK_AT, ENDS_AT = 4, 6, 8, 11, 13


def _one_fails(make: Callable[[bool], TunedTraining], lost: Lost) -> tuple[str, bool, list[str]]:
    """In what it differs from a training in which nobody asked until the same was asked again;
    whether what was in force after it was what it should be, and at last the change; what was said.
    """
    # What travels in fewer bits is another number, from the same step on.
    rounds = {knob: value for knob, value in lost.change.items() if KNOBS[knob].changes_numbers}
    untouched = _Asked(make, bool(rounds))
    untouched.train(AGAIN_AT)
    assert not rounds or untouched.ask(**rounds)
    untouched.train(BACK_AT)
    assert not rounds or untouched.ask()
    untouched.train(ENDS_AT)
    expected = untouched.end()

    ours = _Asked(make)
    assert ours.ask(), "it looks at the steps from here on"
    ours.train(CHANGED_AT)
    assert ours.ask(**lost.earlier)
    ours.train(FAILS_AT)
    fails = dist.get_rank() == lost.rank
    with _Lines() as lines, ours.trouble(lost.place) if fails else nullcontext():
        ours.ask(**lost.change)
        ours.train(FAILS_AT + 1)
    seen = [(ours.now(), lost.earlier if lost.is_begun else {})]
    ours.train(AGAIN_AT)
    assert ours.ask(**lost.change)
    ours.train(BACK_AT)
    seen.append((ours.now(), lost.change))
    assert ours.ask()
    ours.train(ENDS_AT)
    is_as_said = all(now == str(replace(ours.default, **changes)) for now, changes in seen)
    return ours.differs_from(expected), is_as_said, lines


def _refused(
    make: Callable[[bool], TunedTraining], by_rank: list[list[Mapping[str, Any]]]
) -> tuple[list[tuple[bool, bool, list[str]]], str]:
    """Of each change, of which each rank has its own: whether it was made, whether the default is
    in force, and what was said; then in what the training differs from an untouched one."""
    untouched = _Asked(make, is_tuned=False)
    untouched.train(CHANGED_AT)
    expected = untouched.end()
    ours, found = _Asked(make), []
    for changes in by_rank:
        with _Lines() as lines:
            is_made = ours.ask(**changes[dist.get_rank() % len(changes)])
        found.append((is_made, ours.now() == str(ours.default), lines))
    ours.train(CHANGED_AT)
    return found, ours.differs_from(expected)


class TunableContract:
    """Derive a class from it whose name begins with Test, with a fixture ``lost`` that gives a
    :class:`Lost` for each knob, and each place where a change may fail.

    Attributes:
        training: makes one, given whether ours may change it.
        refused: changes that such a model cannot have, each with a part of what is said of it.
        different: two changes that it can have.
    """

    training: Callable[[bool], TunedTraining]
    refused: tuple[tuple[Mapping[str, Any], str], ...]
    different: tuple[Mapping[str, Any], Mapping[str, Any]]

    @pytest.fixture
    def ranks(self) -> Ranks:
        return kept_ranks(2)

    def test_where_a_rank_fails_the_training_goes_on_as_if_nobody_had_asked(
        self, ranks: Ranks, lost: Lost
    ) -> None:
        found = ranks.run(_one_fails, type(self).training, lost)
        assert [each[:2] for each in found] == [("", True)] * len(found)
        (said,) = [line for line in found[0][2] if "all ranks" in line]
        assert not lost.is_begun or f"rank {lost.rank}" in said, "rank 0 says which"
        assert found[lost.rank][2], "and that rank why"

    def test_what_it_cannot_have_is_refused_with_the_reason(self, ranks: Ranks) -> None:
        changes = [[change] for change, _ in self.refused]
        for refusals, differs in ranks.run(_refused, type(self).training, changes):
            assert differs == ""
            for (is_made, is_default, lines), (_, said) in zip(refusals, self.refused, strict=True):
                assert (is_made, is_default) == (False, True)
                assert any(said in line for line in lines), lines

    def test_ranks_that_are_told_different_things_stay_with_the_default(self, ranks: Ranks) -> None:
        found = ranks.run(_refused, type(self).training, [list(self.different)])
        assert [each[0][0][:2] for each in found] == [(False, True)] * len(found)
        assert [each[1] for each in found] == [""] * len(found)
