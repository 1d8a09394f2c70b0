"""Links of the documentation lead somewhere: files, headings and pictures exist; addresses of other
sites are only looked at for their form, as nothing is fetched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.pages import MARKDOWN, ROOT

pytestmark = pytest.mark.slow


PARSER = MarkdownIt("commonmark").enable("table")
SOURCES = [
    path
    for folder in ("autotune", "client", "benchmarks", "examples", "dashboards", "deploy", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".yaml", ".yml", ".json", ".sh", ".html", ".js", ".txt")
]
PAGE_IN_SOURCE = re.compile(r"\b((?:docs|reports)/[\w/-]+\.md)(#[\w-]+)?")


def tokens(page: Path) -> Iterator[Token]:
    for token in PARSER.parse(page.read_text()):
        yield token
        yield from token.children or ()


def links(page: Path) -> Iterator[str]:
    """The targets of links and pictures, also of those in HTML."""
    for token in tokens(page):
        for name in ("href", "src"):
            if target := token.attrGet(name):
                yield str(target)
        if token.type in ("html_block", "html_inline"):
            yield from re.findall(r'\b(?:href|src|srcset)="([^"]*)"', token.content)


@cache
def anchors(page: Path) -> set[str]:
    """As GitHub names the headings of a page."""
    found: list[str] = []
    parsed = PARSER.parse(page.read_text())
    for opening, inline in pairwise(parsed):
        if opening.type == "heading_open":
            words = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def problem(target: str, page: Path) -> str:
    """What is wrong with a link on a page; empty: nothing."""
    address = urlsplit(target)
    if address.scheme:
        is_whole = address.scheme in ("https", "http") and "." in address.netloc
        return "" if is_whole and not re.search(r"\s", target) else "no address of a web page"
    file = (page.parent / address.path).resolve() if address.path else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return "no such file"
    if address.fragment and address.fragment not in anchors(file):
        return f"no such heading; there are {sorted(anchors(file))}"
    return ""


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    wrong = {target: said for target in links(page) if (said := problem(target, page))}
    assert not wrong


def test_pages_that_the_sources_name_exist() -> None:
    named = [
        (path, match)
        for path in SOURCES
        for match in PAGE_IN_SOURCE.finditer(path.read_text(errors="ignore"))
    ]
    assert len(named) > 5
    for path, match in named:
        said = problem(match[0], ROOT / "README.md")
        assert not said, f"{path.relative_to(ROOT)}: {match[0]}: {said}"


@pytest.mark.parametrize(
    "target", ["nowhere.md", "README.md#nothing", "https://", "../outside.md", "mailto:a b"]
)
def test_a_wrong_link_is_found(target: str) -> None:
    assert problem(target, ROOT / "README.md")


FOLDER = ROOT / "changes"
KINDS = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)


def test_each_change_has_a_kind_and_says_something() -> None:
    assert len(KINDS) == 6
    for path in FOLDER.iterdir():
        if path.name != "README.md":
            assert re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", path.name), path.name
            assert path.read_text().strip(), path.name


PAGE = (ROOT / "docs" / "design.md").read_text()
# A section's title names its package; two sections of one package are its two halves.
SECTIONS = re.findall(r"^### `([\w/]+)`: .*\n((?:(?!^#).*\n)*)", PAGE, re.MULTILINE)
PACKAGES = sorted({package for package, _ in SECTIONS})


def listed(package: str) -> set[str]:
    """The folders that have a row in the package's tables."""
    texts = [text for name, text in SECTIONS if name == package]
    return {name for text in texts for name in re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_has_every_folder_of_a_package_and_no_other(package: str) -> None:
    there = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert listed(package) == there


def test_what_the_map_names_is_there() -> None:
    for _, text in SECTIONS:
        for name in re.findall(r"`([a-z_]+/[\w/]*|[a-z_]+\.py)`", text):
            assert any((ROOT / package / name).exists() for package in PACKAGES), name
