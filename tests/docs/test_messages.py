"""The messages that docs/troubleshooting.md explains are those that the sources write."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from bagua_runs.hindrances import RULES
from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# The first cell of each row, and what stands at the beginning of a sentence or a heading.
FIRST_CELLS = re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE)
STARTS = re.findall(r"^(?:## .*?)?(`(?:autotune|BAGUA).*?`)", PAGE, re.MULTILINE)
MESSAGES = [
    message
    for text in [*FIRST_CELLS, *STARTS]
    for message in re.findall(r"`([^`]+)`", text)
    if " " in message and not message.startswith("bagua-autotune show")
]
# In the sources these stand for what a message has in the page's "...".
BLANKS = re.compile(r"\.\.\.|%[sdgr]|%\.\df|\x00")


@cache
def sources() -> tuple[str, ...]:
    """Every text of the packages, in an f-string with a NUL for each value."""
    texts = []
    for package in ("autotune", "client"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append(node.value)
                elif isinstance(node, ast.JoinedStr):
                    parts = (getattr(part, "value", None) for part in node.values)
                    texts.append("".join(p if isinstance(p, str) else "\x00" for p in parts))
    return tuple(BLANKS.sub("\x00", text) for text in texts)


def is_written(message: str) -> bool:
    """Whether one text has all of the message, or several have it one after the other."""
    pieces = [piece.strip(" :;,'()") for piece in BLANKS.split(message)]
    return all(any(piece in text for text in sources()) for piece in pieces if piece)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_that_is_explained_is_written_somewhere(message: str) -> None:
    assert is_written(message)


def test_a_message_that_nobody_writes_is_found() -> None:
    assert len(MESSAGES) > 40
    assert not is_written("autotune is off: the moon is full")


def test_all_that_check_warns_of_is_explained() -> None:
    assert {rule.name for rule in RULES} <= set(MESSAGES)
