"""What the commands print: tables on a terminal, tab-separated lines in a pipe, JSON where asked.

Names and messages come from others: no control character in them reaches the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bagua_autotune.model.text import clean, describe_speedup

if TYPE_CHECKING:
    from bagua_autotune.views.speedup import Figures

# What may be long, and which of it stands below the figures where there is little room.
WORDS = ("job", "name", "runs now", "configuration", "note", "began", "found")
BELOW = ("name", "runs now", "configuration", "note", "began", "found")
NARROWEST_WORDS = 14
INDENT = 6
WIDEST = 10_000
"""A width in columns that no terminal has."""
INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended."""


def say(line: str) -> None:
    """Print one line, whatever the text in it holds."""
    click.echo(clean(line))


def say_beside(line: str) -> None:
    """Print a line to standard error, which a pipe does not read."""
    click.echo(clean(line), err=True)


def print_json(message: BaseModel) -> None:
    """The answer as the API gives it, indented; what is not ASCII is escaped."""
    click.echo(json.dumps(message.model_dump(mode="json"), indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A header and a line for each row; where the terminal is too narrow for that, two lines."""
    lines = [[clean(cell) for cell in line] for line in (columns, *rows)]
    console = Console()
    if not console.is_terminal:
        for line in lines:
            click.echo("\t".join(line))
        return
    if not rows:
        return
    table = _table(lines)
    needed = table.__rich_measure__(console, console.options.update(width=WIDEST)).minimum
    if needed <= console.width or not set(BELOW) & set(columns):
        console.print(table)
    else:
        _print_in_two_lines(console, lines)


def _table(lines: Sequence[Sequence[str]]) -> Table:
    """Make a table in which words may wrap, and figures may not."""
    columns, *rows = lines
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        if column in WORDS:
            table.add_column(column, overflow="fold", min_width=NARROWEST_WORDS)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        # Text: names may hold what rich would take for markup.
        table.add_row(*(Text(cell) for cell in row))
    return table


def _print_in_two_lines(console: Console, lines: Sequence[Sequence[str]]) -> None:
    """The figures of a row in columns, and its words below them."""
    columns = lines[0]
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    figures = [place for place, column in enumerate(columns) if column not in BELOW]
    words = [place for place, column in enumerate(columns) if column in BELOW]
    is_tight = sum(widths[place] + 2 for place in figures) - 2 > console.width
    for line in lines:
        style = "bold" if line is columns else ""
        cells = []
        for place in figures:
            padding = " " * (widths[place] - cell_len(line[place]))
            is_left = columns[place] in WORDS
            cells.append(line[place] + padding if is_left else padding + line[place])
        console.print(Text((" " if is_tight else "  ").join(cells).rstrip()), style=style)
        below = "; ".join(line[place] for place in words if line[place])
        if below:
            console.print(Padding(Text(below), (0, 0, 0, INDENT), expand=False), style=style)


def times(speedup: float | None, low: float | None = None, high: float | None = None) -> str:
    """``1.31x (1.24 to 1.38)``, or ``-`` where nothing is known."""
    return "-" if speedup is None else describe_speedup(speedup, low, high)


def speedup_words(figures: Figures) -> str:
    """``1.31x (1.24 to 1.38) of at most 1.42x``; that it is noise; ``-`` where nothing is known."""
    if figures.is_noise:
        return f"noise: at most {figures.ceiling:.2f}x is possible"
    most = "" if figures.ceiling is None else f" of at most {figures.ceiling:.2f}x"
    return times(figures.speedup, figures.speedup_low, figures.speedup_high) + most
