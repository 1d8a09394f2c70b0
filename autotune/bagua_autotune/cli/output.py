"""What the commands print. Tables are drawn on a terminal, and tab-separated lines in a pipe.

Names and messages come from others: nothing of them reaches a terminal that it would obey.
"""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bagua_autotune.model.text import clean, describe_speedup


def say(line: str) -> None:
    """One line, whatever the text in it holds."""
    click.echo(clean(line))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One header and one line for each row."""
    rows = [[clean(cell) for cell in row] for row in rows]
    console = Console()
    if not console.is_terminal:
        for line in (columns, *rows):
            click.echo("\t".join(line))
        return
    table = Table(header_style="bold", box=None, pad_edge=False)
    for column in columns:
        is_words = column in ("configuration", "name", "job", "summary", "note")
        if is_words:  # on a narrow terminal these go on in the next line
            table.add_column(column, overflow="fold", min_width=14 if rows else None)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        # Text: names may hold what rich would take for markup.
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def times(speedup: float | None, low: float | None = None, high: float | None = None) -> str:
    """``1.31x (1.24 to 1.38)``, or ``-`` where nothing is known."""
    return "-" if speedup is None else describe_speedup(speedup, low, high)
