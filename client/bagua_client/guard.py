"""Watches the loss: what makes it worse is given up, however fast its steps are.

The first look is at trials: a few steps under each are compared with some of the job's own way. The
second is at what was kept, for as long as the training runs; see second_look.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

MARGIN = 0.05
"""The part of the usual loss by which another may exceed it; more is harm."""
DEVIATIONS = 3.0
"""The standard errors that are allowed besides: a loss differs from batch to batch."""
LARGEST = 1e100
"""Of a loss; a larger one counts as not finite, since its square may be."""


class Losses(NamedTuple):
    """The losses of some steps, of any ranks.

    Attributes:
        steps: how many of them were finite.
        total, squares: the sums of those and of their squares.
        lost: how many were not finite.
    """

    steps: int = 0
    total: float = 0.0
    squares: float = 0.0
    lost: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Losses:
        """The losses of one rank, a value for each step."""
        known = [value for value in values if abs(value) <= LARGEST]  # NaN is not
        squares = sum(value * value for value in known)
        return cls(len(known), sum(known), squares, len(values) - len(known))

    @classmethod
    def sum(cls, parts: Iterable[Losses]) -> Losses:
        """Add up the losses of all parts."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    @property
    def told(self) -> int:
        """How many there were."""
        return self.steps + self.lost

    @property
    def mean(self) -> float:
        """Of the finite ones; NaN: there is none."""
        return self.total / self.steps if self.steps else math.nan

    @property
    def variance(self) -> float:
        """The variance of one loss."""
        return max(self.squares / self.steps - self.mean**2, 0.0)


# The second look: whether the training does worse under what was kept than it would have done
# under the default.
#
# The guard's first look compares losses of a few steps, so it sees no harm that takes long to
# show. What was kept may run for weeks, and all the while its loss is compared with the default's
# trajectory. Nobody knows that one without a second training. What can be said of it is that **it
# does not turn back**: a training under the default does not become lastingly worse than it has
# been already. So the loss must stay near the lowest level that it has had, under the default or
# since.
#
# How far it lies above that is summed up (Page, "Continuous inspection schemes", Biometrika 41,
# 1954): little harm counts when it lasts for long, much of it soon. The longer the training has run
# the longer harm must last, since what else raises a loss, such as a learning rate that is raised
# again, takes a part of a training to be made up for.
#
# Two other ways were tried, and left. To extrapolate how far the default would have fallen by now:
# even the smallest further fall that a sum of decays can have after the default's steps was too
# much for a training whose loss falls in the shape of an S, and most begin so. Turns with the
# default: harm stays in the weights, which both would train on, so that both are as bad.
#
# So it is blind to a loss that only falls more slowly than the default's would have, or that stops
# falling, and to what the loss does not tell. It takes for harm, too, whatever raises any
# training's loss for long: other data, another learning rate, a cycle of the data that is longer
# than the tuning and moves the loss by more than the margin. That costs the job its gain, and
# nothing else.

BLOCK_STEPS = 16
"""Steps whose mean loss is one number here; a report after the tuning has more."""
SMOOTHED_BLOCKS = 16
"""Blocks whose median is the smoothed loss: the level."""
SPREAD_BLOCKS = 32
FEWEST_BLOCKS = 8
"""Blocks from which the spread of one is known."""
PATIENCE = 16.0
"""The sum of excesses (see :meth:`SecondLook.judge`) that is harm."""
PATIENCE_SHARE = 0.05
"""It grows by so much with each block that what was kept has run."""
MOST_EXCESS = 3.0
"""Of one block: a spike is no harm that lasts."""
LOST_BLOCKS = 4
"""Blocks in a row whose losses are mostly not finite: that is harm. A few such steps are not:
mixed precision skips them."""


class SecondLook:
    """Watches the losses of what was kept. All ranks give it the same, so it says the same on all.

    A simulation in its test says how often it is wrong.
    """

    def __init__(self) -> None:
        self._default: deque[float] = deque(maxlen=SMOOTHED_BLOCKS)
        self._lowest = math.inf
        self._part, self._part_steps = Losses(), 0
        self.begin()

    def begin(self) -> None:
        """What was kept comes into force. The lowest level stays known, where it was kept before,
        too: what has turned back is not judged by where it stands now."""
        self._take_part(BLOCK_STEPS // 2, self._default)
        self._part, self._part_steps = Losses(), 0
        self._kept: deque[float] = deque(maxlen=SMOOTHED_BLOCKS)
        self._recent = deque(self._default, maxlen=SPREAD_BLOCKS)
        self._blocks = self._lost = 0
        self._excess = 0.0

    def learn(self, losses: Losses, steps: int) -> None:
        """Learn the default's trajectory from losses under what does not change the numbers.

        Args:
            losses: of all ranks.
            steps: in how many steps.
        """
        self._part, self._part_steps = Losses.sum((self._part, losses)), self._part_steps + steps
        self._take_part(BLOCK_STEPS, self._default)

    def judge(self, losses: Losses, steps: int) -> str:
        """Judge losses under what was kept; says what is wrong, if anything is.

        A block's excess is how far it lies above the lowest level, in units of the margin and a
        block's standard deviation, less one; the sum begins anew at 0 whenever it falls below. The
        margin is 5 % of the default's last level, and does not shrink with the loss: where a
        training has come close to 0 its loss wanders by more.
        """
        self._part, self._part_steps = Losses.sum((self._part, losses)), self._part_steps + steps
        block = self._take_part(BLOCK_STEPS, self._kept)
        if block is None:
            return ""
        self._blocks += 1
        if math.isnan(block):
            self._lost += 1
            if self._lost < LOST_BLOCKS or not self._recent:
                return ""
            return f"the loss is not finite any more; it was {self._recent[-1]:.4g} before"
        self._lost = 0
        self._recent.append(block)
        if len(self._recent) < FEWEST_BLOCKS:
            return ""
        spread = _spread(self._recent)
        self._lower(self._default, spread)
        if len(self._kept) == SMOOTHED_BLOCKS:
            self._lower(self._kept, spread)
        if math.isinf(self._lowest):
            return ""
        usual = median(self._default) if self._default else 0.0
        unit = MARGIN * max(abs(usual), abs(self._lowest)) + spread
        excess = (block - self._lowest) / unit - 1 if unit else 0.0
        self._excess = max(0.0, self._excess + min(excess, MOST_EXCESS))
        if self._excess <= PATIENCE + PATIENCE_SHARE * self._blocks:
            return ""
        now, low = median(list(self._recent)[-FEWEST_BLOCKS:]), self._lowest
        return (
            f"the loss is {now:.4g}, and {low:.4g} to {low + unit:.4g} was to be expected, as a "
            "training by default does not turn back"
        )

    def _take_part(self, fewest_steps: int, blocks: deque[float]) -> float | None:
        """Make a block of what was told since the last one, if that is enough; NaN: most of its
        losses are not finite."""
        if self._part_steps < fewest_steps:
            return None
        losses, self._part, self._part_steps = self._part, Losses(), 0
        if losses.steps < losses.lost:
            return math.nan
        blocks.append(losses.mean)
        return losses.mean

    def _lower(self, blocks: Sequence[float], spread: float) -> None:
        """Note the level of these blocks if it is the lowest by now; with its standard errors, as
        the lowest of many is low by chance."""
        if blocks:
            # That of a median; see bagua_client.reporter.lasting_change.
            error = 1.2533 * spread / math.sqrt(len(blocks))
            self._lowest = min(self._lowest, median(blocks) + DEVIATIONS * error)


def _spread(losses: Sequence[float]) -> float:
    """The standard deviation of one, by the median difference of two neighbours: what lasts, or
    happens once, counts for nothing."""
    return 1.4826 * median(abs(b - a) for a, b in pairwise(losses)) / math.sqrt(2)


FEWEST_LOSSES = 8
REMEMBERED_REPORTS = 32
MOST_UNREAD = 1024
# Of all reports. Few: where a loss falls, those of long ago are higher than usual.
REPORTS_TOGETHER = 8


class LossGuard:
    """Compares the losses of trials that change the numbers with those of trials that do not. All
    ranks give it the same losses, so it decides the same on all.

    Attributes:
        has_any: whether this rank was told a loss.
    """

    def __init__(self) -> None:
        self.has_any = False
        self._own: deque[tuple[torch.Tensor, Any]] = deque(maxlen=MOST_UNREAD)
        self._usual: deque[Losses] = deque(maxlen=REMEMBERED_REPORTS)
        self._tried: deque[Losses] = deque(maxlen=REMEMBERED_REPORTS)
        # With how they changed the numbers: most trials are too short to be judged alone.
        self._last: deque[tuple[object, Losses]] = deque(maxlen=REPORTS_TOGETHER)
        self._change: object = None
        self._second_look = SecondLook()
        self._is_kept = self._is_paused = False

    # One rank's

    def tell(self, loss: torch.Tensor | float) -> None:
        """Take this rank's loss in one step; a tensor of several is averaged. Waits for no device.

        Raises:
            TypeError: neither a tensor nor a number.
        """
        if not isinstance(loss, torch.Tensor | float | int):
            raise TypeError(f"a loss must be a tensor or a number, not {type(loss).__name__}")
        self.has_any = True
        value = torch.as_tensor(loss).detach().double().mean()
        event: Any = None
        if value.device.type == "cuda":
            with torch.cuda.device(value.device):
                copy = torch.empty((), dtype=torch.float64, pin_memory=True)
                value = copy.copy_(value, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        self._own.append((value, event))

    def take(self) -> Losses:
        """Return this rank's losses that are known by now, each once; none while configurations
        change.
        """
        known = []
        while self._own and (self._own[0][1] is None or self._own[0][1].query()):
            known.append(float(self._own.popleft()[0]))
        if self._is_paused:
            return Losses()
        return Losses.of(known)

    # All ranks'

    def pause(self) -> None:
        """Take no losses: another configuration is about to come into force."""
        self._is_paused = True

    def begin(self, change: object, is_kept: bool = False) -> None:
        """Begin with another configuration, which is in force now; forgets the losses that were not
        taken.

        Args:
            change: how it changes the numbers; None: not at all.
            is_kept: it was not put in force as a trial, but stays.
        """
        self._is_paused, self._change = False, change
        self._is_kept = is_kept and change is not None
        self._own.clear()
        self._tried.clear()
        if self._is_kept:
            self._second_look.begin()

    def judge(self, by_rank: Sequence[Losses]) -> str:
        """Judge the ranks' losses under what is in force; says what is wrong, if anything is.

        Those of a trial are judged alone, and with those of the last ones that changed the numbers
        in the same way.
        """
        losses, steps = Losses.sum(by_rank), max(each.told for each in by_rank)
        if not losses.told:
            return ""
        if self._is_kept:
            self._last.clear()
            return self._second_look.judge(losses, steps)
        self._last.append((self._change, losses))
        if self._change is None:
            self._second_look.learn(losses, steps)
            self._usual.append(losses)
            return ""
        self._tried.append(losses)
        alike = Losses.sum(told for change, told in self._last if change == self._change)
        usual = Losses.sum(self._usual)
        return _harm(Losses.sum(self._tried), usual) or _harm(alike, usual)


def _harm(tried: Losses, usual: Losses) -> str:
    """What is wrong with the losses of trials that change the numbers, if anything is."""
    if usual.steps < FEWEST_LOSSES or usual.lost:
        return ""
    if tried.lost:
        return f"the loss is not finite; it was {usual.mean:.4g} before"
    if tried.steps < FEWEST_LOSSES:
        return ""
    error = math.sqrt(usual.variance / usual.steps + tried.variance / tried.steps)
    most = usual.mean + MARGIN * abs(usual.mean) + DEVIATIONS * error
    if tried.mean <= most:
        return ""
    return (
        f"the loss is {tried.mean:.4g}; it was {usual.mean:.4g} before, and only "
        f"up to {most:.4g} would be chance"
    )
