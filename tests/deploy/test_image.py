"""What the Dockerfile says of the project; ``make image`` builds it and sees it work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click import Option
from sqlalchemy import make_url

from bagua_autotune.cli.serve import serve
from bagua_autotune.settings import ENVIRONMENT, Settings

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def stages() -> list[list[list[str]]]:
    """The instructions of each stage, as words; continued lines are one."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: list[list[list[str]]] = []
    for line in lines:
        if line.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(line.split())
    return found


def last(stages: list[list[list[str]]], instruction: str) -> str:
    """What the final stage's instruction of this name says; an AssertionError if not one."""
    (words,) = [words for words in stages[-1] if words[0] == instruction]
    return " ".join(words[1:])


def environment(stages: list[list[list[str]]]) -> dict[str, str]:
    pairs = (word.partition("=") for word in last(stages, "ENV").split())
    return {name: value for name, _, value in pairs}


def test_what_is_copied_is_there_and_sent_to_the_builder(stages: list[list[list[str]]]) -> None:
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [
        source
        for stage in stages
        for words in stage
        if words[0] == "COPY" and not words[1].startswith("--from")
        for source in words[1:-1]
    ]
    assert set(copied) == set(kept)
    assert all((ROOT / source).exists() for source in copied)


def test_the_extras_that_it_installs_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r'extras\["(\w+)"\]', (ROOT / "Dockerfile").read_text())
    assert named
    assert set(named) <= set(extras["optional-dependencies"])
    assert not any(
        "torch" in line for name in named for line in extras["optional-dependencies"][name]
    )


def test_it_starts_the_service_where_its_parts_expect_it(stages: list[list[list[str]]]) -> None:
    program, command, *arguments = json.loads(last(stages, "ENTRYPOINT"))
    assert (program, command) == ("bagua-autotune", "serve")
    options = {
        flag for option in serve.params if isinstance(option, Option) for flag in option.opts
    }
    assert {word for word in arguments if word.startswith("--")} <= options
    port = arguments[arguments.index("--port") + 1]
    assert port == last(stages, "EXPOSE") == str(Settings().port)
    assert f"http://127.0.0.1:{port}/healthz" in last(stages, "HEALTHCHECK")


def test_it_is_an_ordinary_user_and_writes_to_its_volume_alone(
    stages: list[list[list[str]]],
) -> None:
    assert all(int(number) > 0 for number in last(stages, "USER").split(":"))
    volume = last(stages, "VOLUME")
    assert last(stages, "WORKDIR") == environment(stages)["HOME"] == volume
    database = make_url(environment(stages)[ENVIRONMENT["database"]]).database
    assert database is not None
    assert Path(database).is_relative_to(volume)
