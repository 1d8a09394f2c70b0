"""Where a value goes, and that nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bagua_runs.places import (
    Argument,
    ConfigFile,
    EnvironmentVariable,
    FileKey,
    Place,
    Start,
    Switch,
)

pytestmark = pytest.mark.slow

COMMAND = ("torchrun", "--nproc-per-node", "2", "train.py", "--lr=0.1", "--size", "25", "--fast")


def put(place: Place, text: str, command: tuple[str, ...] = COMMAND) -> tuple[str, ...]:
    return place.put(Start(command), text, Path()).command


@pytest.mark.parametrize(
    ("place", "own"),
    [
        (EnvironmentVariable("A"), "1"),
        (EnvironmentVariable("EMPTY"), None),
        (EnvironmentVariable("B"), None),
        (Argument("--lr"), "0.1"),
        (Argument("--size"), "25"),
        (Argument("--other"), None),
        (Switch("--fast"), "on"),
        (Switch("--slow"), "off"),
    ],
)
def test_the_users_own_value(place: Place, own: str | None) -> None:
    assert place.own(COMMAND, {"A": "1", "EMPTY": ""}) == own


def test_an_argument_is_replaced_in_the_form_that_it_has_or_appended() -> None:
    assert put(Argument("--lr"), "0.2")[4] == "--lr=0.2"
    assert put(Argument("--size"), "50")[5:7] == ("--size", "50")
    assert put(Argument("--other"), "x") == (*COMMAND, "--other", "x")
    twice = ("job", "--a=1", "--a", "2")
    assert Argument("--a").own(twice, {}) == "2", "as argparse has it"
    assert put(Argument("--a"), "3", twice) == ("job", "--a=1", "--a", "3")


def test_a_switch_is_given_or_not() -> None:
    assert put(Switch("--fast"), "off") == COMMAND[:-1]
    assert put(Switch("--slow"), "on") == (*COMMAND, "--slow")


@pytest.mark.parametrize("command", [("job", "--fast"), ("job", "--fast", "--other", "1")])
def test_an_argument_without_a_value_is_told_to_be_a_switch(command: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"--fast has no value in the command; .* --arg --fast"):
        Argument("--fast").own(command, {})
    assert Argument("--number").own(("job", "--number", "-1"), {}) == "-1"


@given(st.lists(st.sampled_from(["--a", "--b", "--a=1", "1", "x"])), st.sampled_from(["2", "z"]))
def test_an_argument_that_was_put_is_found_again(words: list[str], text: str) -> None:
    command = ("job", *words)
    try:
        Argument("--a").own(command, {})
    except ValueError:
        return
    changed = put(Argument("--a"), text, command)
    assert Argument("--a").own(changed, {}) == text
    assert put(Argument("--a"), text, changed) == changed


@pytest.fixture
def ds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero": {"size": 5e8, "overlap": False, "auto": "auto"}, "n": "1"}))
    (tmp_path / "copies").mkdir()
    return path


def key(path: str, *keys: str, command: tuple[str, ...]) -> FileKey:
    return FileKey(ConfigFile.read(path, "JSON", command), keys)


def test_keys_of_a_file_are_changed_in_one_copy(ds: Path) -> None:
    before = ds.read_bytes()
    command = ("job", "--ds_config", "./ds.json", f"--again={ds}", "ds.json.bak")
    file = ConfigFile.read("ds.json", "JSON", command)
    start = Start(command)
    for keys, text in (
        (("zero", "size"), "200000000"),
        (("zero", "overlap"), "true"),
        (("zero", "auto"), "0.5"),
        (("n",), "2"),
        (("new", "deep"), "word"),
    ):
        start = FileKey(file, keys).put(start, text, ds.parent / "copies")
    [copy] = (ds.parent / "copies").iterdir()
    assert start.command == ("job", "--ds_config", str(copy), f"--again={copy}", "ds.json.bak")
    assert json.loads(copy.read_text()) == {
        "zero": {"size": 200000000, "overlap": True, "auto": 0.5},
        "n": "2",
        "new": {"deep": "word"},
    }
    assert ds.read_bytes() == before


def test_the_own_values_of_keys(ds: Path) -> None:
    command = ("job", "ds.json")
    found = [
        key("ds.json", *keys.split("."), command=command).own(command, {})
        for keys in ("zero.size", "zero.overlap", "zero.auto", "n", "zero.other", "other.x")
    ]
    assert found == ["500000000", "false", "auto", "1", None, None]
    with pytest.raises(ValueError, match=r"ds\.json: zero is no single value"):
        key("ds.json", "zero", command=command).own(command, {})
    with pytest.raises(ValueError, match=r"ds\.json: n holds no keys"):
        key("ds.json", "n", "x", command=command).own(command, {})


def test_nothing_that_is_there_is_overwritten(ds: Path) -> None:
    before = ds.read_bytes()
    start = key("ds.json", "n", command=("ds.json",)).put(Start(("ds.json",)), "3", ds.parent)
    assert start.command == (str(ds.parent / "2-ds.json"),)
    assert ds.read_bytes() == before


def test_a_yaml_file_keeps_its_kinds_of_values(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    content = {"fsdp_config": {"fsdp_offload": False, "n": 2}, "downcast_bf16": "no"}
    path.write_text(yaml.safe_dump(content))
    command = ("accelerate", "launch", "--config_file", str(path))
    place = FileKey(ConfigFile.read(str(path), "YAML", command), ("fsdp_config", "prefetch"))
    start = place.put(Start(command), "true", tmp_path)
    assert yaml.safe_load(Path(start.command[-1]).read_text()) == {
        "fsdp_config": {"fsdp_offload": False, "n": 2, "prefetch": True},
        "downcast_bf16": "no",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: "),
        ("[1]", "holds no object with keys"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_none_is_said(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ConfigFile.read(str(path), "JSON", ("job", str(path)))
