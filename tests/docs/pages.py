"""What a reader of the documentation would type: the commands and the Python of each page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
PUBLISHED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKDOWN = [
    *PUBLISHED,
    *(page for page in sorted(ROOT.glob("*.md")) if page not in PUBLISHED),
    *sorted((ROOT / "changes").glob("*.md")),
    *sorted((ROOT / "reports").glob("*.md")),
]
PAGES = [*PUBLISHED, *EXAMPLES]
SHELLS = ("sh", "bash", "shell", "console")
PROGRAMS = (
    "accelerate", "bagua-autotune", "bagua-run", "docker", "helm", "kubectl", "make", "pip",
    "python", "sbatch", "srun", "sudo", "torchrun",
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced or an indented block.

    Attributes:
        place: the page and the line where it begins.
        language: of a fence; empty: it is indented, or the fence says none.
        text: without fence and indentation.
    """

    place: str
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]


@dataclass(frozen=True)
class Command:
    """One command, with its continued lines; ``text`` is what bash gets."""

    place: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Of a page; of an example those of its docstring."""
    text = page.read_text()
    if page.suffix == ".py":
        text = ast.get_docstring(ast.parse(text), clean=False) or ""
    lines, name = text.splitlines(), page.relative_to(ROOT)
    number = 0
    while number < len(lines):
        begin = number
        if fence := re.match(r"( *)```([\w{}-]*)", lines[number]):
            number += 1
            while not lines[number].strip().startswith("```"):
                number += 1
            inside = [line.removeprefix(fence[1]) for line in lines[begin + 1 : number]]
            yield Block(f"{name}:{begin + 1}", fence[2], "\n".join(inside))
        elif lines[number].startswith("    ") and (number == 0 or not lines[number - 1].strip()):
            while number < len(lines) and (
                lines[number].startswith("    ") or not lines[number].strip()
            ):
                number += 1
            inside = [line[4:] for line in lines[begin:number]]
            yield Block(f"{name}:{begin + 1}", "", "\n".join(inside).rstrip())
            continue
        number += 1


def commands_of(block: Block) -> Iterator[Command]:
    """Each of the block; what stands after an empty line, or beside ``$``, is what they print."""
    text = block.text.partition("\n\n")[0]
    lines = text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    for line in lines:
        if command := re.sub(r"\s+#\s.*$", "", re.sub(r" {2,}", " ", line)).strip():
            yield Command(block.place, command)


def mentions(page: Path) -> Iterator[Command]:
    """The commands inside sentences, as code; each once."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = dict.fromkeys(" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))
    for code in found:
        if re.match(rf"([A-Z_]+=\S* )*({'|'.join(PROGRAMS)}) ", code):
            yield Command(str(page.relative_to(ROOT)), code)
