"""What the Dockerfile says of the project; ``make image`` builds it and sees it work."""

from __future__ import annotations

import json
import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from click import Option
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sqlalchemy import make_url

from bagua_autotune.cli.commands.serve import serve
from bagua_autotune.settings import ENVIRONMENT, Settings

pytestmark = pytest.mark.slow

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


def pinned(name: str) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes of each requirement that a file of deploy names."""
    text = (ROOT / "deploy" / name).read_text()
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    found = {}
    for requirement, *options in (line.split() for line in lines if line.strip()):
        name, _, version = requirement.partition("==")
        hashes = [
            option for option in options if re.fullmatch("--hash=sha256:[0-9a-f]{64}", option)
        ]
        assert options == hashes, requirement
        found[canonicalize_name(name)] = version, hashes
    return found


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-build.txt"])
def test_each_requirement_has_hashes_and_the_version_that_was_tested(name: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.partition("==") for line in lines if not line.startswith("#"))
    tested = {canonicalize_name(name): version for name, _, version in pairs}
    found = pinned(name)
    assert found
    assert [each for each, (_, hashes) in found.items() if not hashes] == []
    others = {n: v for n, (v, _) in found.items() if n in tested and v != tested[n]}
    assert others == {}
    assert [n for n in found if n not in tested and n not in ("setuptools", "wheel")] == []


def test_all_that_the_service_needs_is_among_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    found = pinned("requirements.txt")
    wanted = [Requirement(line) for name in ("service", "postgresql") for line in extras[name]]
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name in seen or (marker and not marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        assert name in found, f"{name} is missing: run deploy/pin_requirements.sh"
        assert requirement.specifier.contains(found[name][0])
        wanted += map(Requirement, requires(name) or ())
    assert "torch" not in found
    builds = [Requirement(line).name for line in project["build-system"]["requires"]]
    assert set(map(canonicalize_name, builds)) <= set(pinned("requirements-build.txt"))


def test_whatever_is_fetched_is_compared_with_its_hash(stages: list[list[list[str]]]) -> None:
    commands = [
        command
        for stage in stages
        for words in stage
        if words[0] == "RUN"
        for command in " ".join(words[1:]).split("&&")
        if " pip " in command
    ]
    assert len(commands) == 4
    assert [c for c in commands if "--require-hashes" not in c and "--no-index" not in c] == []


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
