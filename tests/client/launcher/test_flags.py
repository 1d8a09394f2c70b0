"""Every flag of Bagua's launchers is understood, and what it said is said by a variable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_client.environment import Environment
from bagua_client.launcher.flags import FLAGS, GONE, farewells, spellings, variables
from bagua_client.run import parser
from tests.outside import BAGUA, folder_of

pytestmark = pytest.mark.slow

SETS = {
    "bagua_service_port": ("29501", "BAGUA_SERVICE_PORT", "29501"),
    "default_bucket_size": ("10485760", "BAGUA_DEFAULT_BUCKET_SIZE", "10485760"),
    "autotune_level": ("1", "BAGUA_AUTOTUNE", "1"),
    "autotune_max_samples": ("60", "BAGUA_AUTOTUNE_MAX_SAMPLES", "60"),
    "autotune_memory": ("0.8", "BAGUA_AUTOTUNE_MEMORY", "0.8"),
    "autotune_max_minutes": ("5", "BAGUA_AUTOTUNE_MAX_MINUTES", "5.0"),
    "autotune_max_rounds": ("1", "BAGUA_AUTOTUNE_MAX_ROUNDS", "1"),
    "autotune_fresh": (None, "BAGUA_AUTOTUNE_FRESH", "1"),
    "autotune_sampling_confidence_time": (
        "5",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
        "5.0",
    ),
    "autotune_warmup_time": ("30.0", "BAGUA_AUTOTUNE_WARMUP_TIME_S", "30.0"),
    "is_output_autotune_log": (None, "BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "1"),
    "autotune": (None, "BAGUA_AUTOTUNE", "1"),
}
"""Flag: a value on the command line, the variable, and its value."""
SCRIPT = ("train.py", "--lr", "0.1", "--bagua", "--autotune")


def _options(file: Path) -> Iterator[tuple[list[str], bool]]:
    """The spellings of each flag that the program declares, and whether a value follows."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if str(names[0]).startswith("-"):
                action = keywords.get("action", "'store'")
                yield [str(name) for name in names], action in ("'store'", "env", "'append'")


@pytest.mark.parametrize("program", ["distributed/launch", "distributed/run", "script/baguarun"])
def test_all_flags_of_bagua_are_understood(program: str) -> None:
    known = parser()
    found = list(_options(folder_of(BAGUA) / "bagua" / f"{program}.py"))
    assert len(found) >= 8
    for names, takes_value in found:
        for name in names:
            value = {"--start_method": "spawn"}.get(name, "1")
            words = [name, value] if takes_value else [name]
            options = known.parse_args([*words, *SCRIPT])
            assert options.training_script == SCRIPT[0], name
            assert tuple(options.training_script_args) == SCRIPT[1:], name


@pytest.mark.parametrize("name", SETS)
def test_a_flag_says_what_its_variable_says(name: str) -> None:
    value, variable, expected = SETS[name]
    for spelling in spellings(name):
        given = [spelling] if value is None else [f"{spelling}={value}"]
        found = variables(parser().parse_args([*given, *SCRIPT]))
        assert found == {variable: expected}
        Environment.read(found)


def test_the_table_is_whole_and_what_is_not_given_says_nothing() -> None:
    assert {flag.name for flag in FLAGS} == set(SETS)
    options = parser().parse_args([*SCRIPT])
    assert variables(options) == {}
    assert farewells(options) == []


def test_what_is_gone_is_told_in_a_line_each() -> None:
    words = [
        word
        for gone in GONE
        for word in (spellings(gone.name)[-1], *(["1"] if gone.takes_value else []))
    ]
    lines = farewells(parser().parse_args([*words, *SCRIPT]))
    assert len(lines) == len(GONE) - 1
    for line in lines:
        assert line.startswith("--")
        assert "\n" not in line
