"""What docs/results.md prints is so: the program runs, line, file and knobs are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bagua_client import Configuration, Tuning, callbacks
from bagua_client.configuration import ConfigurationFile
from bagua_client.environment import read_choices
from bagua_client.tuning import write_result_line

PAGE = (Path(__file__).parents[2] / "docs" / "results.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_callbacks_are_those_that_there_are() -> None:
    named = re.findall(r"callbacks\.(\w+)\(", _blocks("python")[1])
    assert all(callable(getattr(callbacks, name)) for name in named)
    assert re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE) == named


def test_the_line_has_the_fields_that_are_written(tmp_path: Path) -> None:
    default = Configuration()
    tuning = Tuning(state="finished", configuration=default, default=default, rank=0, best=default)
    path = tmp_path / "results.jsonl"
    write_result_line(str(path), tuning)
    printed, written = json.loads(_blocks("json")[0]), json.loads(path.read_text())
    assert set(printed) == set(written)
    assert set(printed["best"]) == set(written["best"])
    documented = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| `.*", PAGE, re.MULTILINE))))
    assert set(tuning.to_json()) <= documented


def test_what_is_written_by_hand_is_read(tmp_path: Path) -> None:
    found = re.search(r"by hand needs only `(.*?)`", PAGE)
    assert found is not None
    (tmp_path / "hand.json").write_text(found[1])
    file = ConfigurationFile.read(str(tmp_path / "hand.json"))
    assert file.configuration == Configuration(4 * 2**20)


def test_every_example_of_knobs_is_read() -> None:
    table = PAGE.partition("## Knobs switched off or pinned")[2]
    examples = re.findall(r"^\| `(.*?)` \|", table, re.MULTILINE)
    assert [len(read_choices(example)) for example in examples] == [1, 1, 1, 1, 1, 3]
