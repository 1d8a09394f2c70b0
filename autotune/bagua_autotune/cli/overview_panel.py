"""A job on a terminal while it is being tuned: what ``watch`` draws."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bagua_autotune.cli.output import speedup_words
from bagua_autotune.model.job import CONTACT_SECONDS, RUNS
from bagua_autotune.model.text import clean, describe_count, describe_left, describe_seconds
from bagua_autotune.views.overviews import JobOverview
from bagua_autotune.views.speedup import Figures
from bagua_autotune.views.steps import StepSeries
from bagua_autotune.views.summary import JobSummary, name_life
from bagua_wire.messages import BEING_TUNED
from bagua_wire.words import describe

# A series of numbers in one line of block characters.

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the values in at most ``width`` characters; each shows the median of its share of the
    values.
    """
    shares = condense(values, width)
    low, high = min(shares, default=0.0), max(shares, default=0.0)
    if high <= low:
        return BLOCKS[0] * len(shares)
    steps = (len(BLOCKS) - 1) / (high - low)
    return "".join(BLOCKS[round((value - low) * steps)] for value in shares)


def condense(values: Sequence[float], width: int) -> list[float]:
    """The values, or the medians of ``width`` shares of nearly equal length."""
    count = min(len(values), width)
    ends = [place * len(values) // count for place in range(count + 1)] if count > 0 else []
    return [median(values[begin:end]) for begin, end in pairwise(ends)]


LABEL_WIDTH = 9
WIDEST_GRAPH = 80
WIDEST_BAR = 24
NARROWEST_BAR = 8
SILENT_STEPS = 20
"""A job that is being tuned reports every few steps."""
SHORTEST_SILENCE_SECONDS = 5.0
UNKNOWN_STEP_SECONDS = 3.0

Row = tuple[str, RenderableType]


class OverviewPanel:
    """A job's overview, drawn to the width of the terminal.

    Args:
        overview: of the job.
        trouble: why there is no newer overview; empty: there is no trouble.
    """

    def __init__(self, overview: JobOverview, trouble: str = "") -> None:
        self._overview = overview
        self._trouble = trouble or silence(overview.job)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - LABEL_WIDTH, 1)
        grid = Table.grid(expand=False)
        grid.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in self._rows(width, options.ascii_only):
            # Text: names may hold what rich would take for markup.
            grid.add_row(label, Text(clean(value)) if isinstance(value, str) else value)
        yield grid

    def _rows(self, width: int, ascii_only: bool) -> Iterator[Row]:
        overview = self._overview
        job, figures = overview.job, overview.job.figures
        yield "job", _title(job)
        if overview.lives:
            yield "life", _life(overview)
        yield "trials", _progress(job, width)
        yield "now", _now(overview)
        yield "best", _best(overview)
        yield (
            "default",
            describe(overview.default_configuration) + _pace(figures.baseline_seconds),
        )
        if overview.steps.points:
            yield from _steps(overview.steps, min(width, WIDEST_GRAPH), ascii_only)
        yield from _costs(figures, job.state in BEING_TUNED)
        yield from _losses(figures)
        if self._trouble:
            yield "trouble", Text(clean(self._trouble), style="bold yellow")


def _title(job: JobSummary) -> Text:
    again = f", round {job.round}" if job.round else ""
    state_style = "cyan" if job.state in BEING_TUNED else "green"
    return Text.assemble((clean(job.name), "bold"), (f"  {job.state}{again}", state_style))


def _life(overview: JobOverview) -> str:
    words = name_life(overview.lives, overview.job.id).removeprefix("life ")
    newest = overview.lives[-1]
    return words if newest.job == overview.job.id else f"{words}; the newest is job {newest.job}"


def _progress(job: JobSummary, width: int) -> RenderableType:
    progress = job.progress
    if job.state not in BEING_TUNED:
        return str(progress.trials_measured)
    begun, most = job.phase_trials
    text = f"{begun} of at most {most}"
    if progress.seconds_left is not None:
        text += f", {describe_left(progress.seconds_left)}"
    bar_width = min(width - len(text) - 2, WIDEST_BAR)
    if bar_width < NARROWEST_BAR:
        return text
    bar = ProgressBar(most, min(begun, most), bar_width, complete_style="cyan")
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(bar, Text(text))
    return line


def _now(overview: JobOverview) -> str:
    job = overview.job
    if job.trial is not None:
        words = f"trial {job.trial.index}: {describe(job.trial.configuration)}"
        # The latest steps may still be those of the previous trial.
        is_known = any(p.trial == job.trial.index for p in overview.steps.points[-1:])
        return words + _pace(job.figures.current_seconds if is_known else None)
    if job.state in BEING_TUNED:
        return "the next trial is being chosen"
    return describe(job.configuration)


def _best(overview: JobOverview) -> str:
    best = next((trial for trial in overview.trials if trial.is_best), None)
    if best is None:
        return "not known yet"
    figures = overview.job.figures
    pace = _pace(figures.incumbent_seconds)
    if best.configuration == overview.default_configuration:
        return f"the default{pace}"
    return f"trial {best.index}: {best.words}{pace}, {speedup_words(figures)}"


def _pace(seconds: float | None) -> str:
    return "" if seconds is None else f"; {describe_seconds(seconds)} per step"


def _steps(steps: StepSeries, width: int, ascii_only: bool) -> Iterator[Row]:
    values = [point.seconds for point in steps.points]
    shown = condense(values, width)
    low, high = describe_seconds(min(shown)), describe_seconds(max(shown))
    first, last = steps.points[0].step, steps.points[-1].step + steps.stride - 1
    if not ascii_only:
        yield "steps", Text(sparkline(values, width), style="cyan")
    yield "steps" if ascii_only else "", f"{low} to {high}, steps {first} to {last}"


def _costs(figures: Figures, is_unfinished: bool) -> Iterator[Row]:
    if not figures.cost_steps or not figures.cost_seconds:
        return
    cost = f"{figures.cost_steps:.3g} steps of the default"
    cost += f" ({describe_seconds(figures.cost_seconds)})"
    if figures.payback_steps is not None:
        cost += f", paid back after {describe_count(figures.payback_steps, 'step')}"
        cost += ", if it ended now" if is_unfinished else ""
    yield "cost", cost


def _losses(figures: Figures) -> Iterator[Row]:
    if figures.exposed_seconds is not None:
        exposed = describe_seconds(figures.exposed_seconds)
        default = ""
        if figures.default_exposed_seconds is not None:
            default = f", {describe_seconds(figures.default_exposed_seconds)} by default"
        what = "of communication that computing does not hide, in what runs now"
        yield "exposed", f"{exposed} {what}{default}"
    share, spread = figures.slowest_share, figures.rank_spread_ratio
    if figures.slow_rank is not None and share is not None and spread is not None:
        often = f"rank {figures.slow_rank} in {share:.0%} of the latest steps"
        yield "slowest", f"{often}, by {spread:.0%} of a step"


def silence(job: JobSummary) -> str:
    """Says that the job has stopped reporting in the middle of its tuning; empty: it has not."""
    silent = time.time() - job.last_contact_at
    step_seconds = job.figures.current_seconds or UNKNOWN_STEP_SECONDS
    patience = max(SHORTEST_SILENCE_SECONDS, SILENT_STEPS * step_seconds)
    if job.protocol in RUNS:  # it reports when a run is over, and else as often as this
        patience = 2 * CONTACT_SECONDS
    if job.state not in BEING_TUNED or job.deciding or silent < patience:
        return ""
    return f"the job last reported {describe_seconds(round(silent))} ago"
