"""Every block of Python in README.md and docs/ runs as printed, or stands in python_blocks.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.checks import RUN_SECONDS, scratch_environment
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.docs.python_blocks import BEFORE, COMPILED

pytestmark = pytest.mark.slow

BLOCKS = [
    block for page in PAGES for block in blocks(page) if block.language in ("python", "py", "pycon")
]


def entry(table: tuple[tuple[str, str, str], ...], block: Block) -> str | None:
    """What the table says of the block."""
    page = block.place.partition(":")[0]
    said = [text for name, begin, text in table if name == page and block.text.startswith(begin)]
    assert len(said) <= 1, f"{block.place} is in the table {len(said)} times"
    return said[0] if said else None


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """By place; one process imports torch for all of them."""
    folder = tmp_path_factory.mktemp("python")
    path = folder / "blocks.json"
    path.write_text(
        json.dumps(
            [
                [
                    block.place.partition(":")[0],
                    entry(BEFORE, block) or "",
                    block.text,
                    entry(COMPILED, block) is not None,
                ]
                for block in BLOCKS
            ]
        )
    )
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_python.py")), str(path)],
        cwd=folder,
        env=scratch_environment(folder),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return dict(zip((block.place for block in BLOCKS), found, strict=True))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_it_runs_as_printed(block: Block, errors: dict[str, str | None]) -> None:
    assert errors[block.place] is None, f"{block.place}\n{errors[block.place]}"


@pytest.mark.parametrize(("page", "begin", "text"), [*BEFORE, *COMPILED])
def test_each_entry_is_one_of_a_block_that_there_is(page: str, begin: str, text: str) -> None:
    assert (ROOT / page).is_file()
    assert any(entry(((page, begin, text),), block) for block in BLOCKS)
