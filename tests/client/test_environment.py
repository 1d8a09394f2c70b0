"""Reading the environment variables."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bagua_client
from bagua_client import environment
from bagua_client.environment import Environment
from bagua_client.knob_choices import Choice

IN_VAIN = "BAGUA_AUTOTUNE is not set, so the training is not tuned; without effect:"


def test_an_empty_variable_counts_as_not_set() -> None:
    names = ["BAGUA_AUTOTUNE", "BAGUA_AUTOTUNE_URL", "BAGUA_DEFAULT_BUCKET_SIZE"]
    names += ["BAGUA_AUTOTUNE_JOB", "BAGUA_AUTOTUNE_TOKEN", "BAGUA_AUTOTUNE_RESULT"]
    names += ["BAGUA_AUTOTUNE_CHECK", "BAGUA_CONFIGURATION", "BAGUA_AUTOTUNE_KNOBS"]
    for nothing in ("", " ", "\t\n"):
        assert Environment.read(dict.fromkeys(names, nothing)) == Environment()


def test_every_variable_is_read() -> None:
    assert Environment.read(
        {
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_URL": " http://tuner:8123",
            "BAGUA_AUTOTUNE_TOKEN": "secret\n",
            "BAGUA_AUTOTUNE_JOB": "digits\n",
            "BAGUA_AUTOTUNE_MAX_SAMPLES": "7",
            "BAGUA_AUTOTUNE_MAX_MINUTES": "1.5",
            "BAGUA_AUTOTUNE_MAX_ROUNDS": "3",
            "BAGUA_AUTOTUNE_MEMORY": "0.75",
            "BAGUA_AUTOTUNE_FRESH": "yes",
            "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.5",
            "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0",
            "BAGUA_AUTOTUNE_REMAINING_STEPS": "500",
            "BAGUA_AUTOTUNE_SERVER_WAIT_TIME": "12.5",
            "BAGUA_SERVICE_PORT": "8123",
            "BAGUA_DEFAULT_BUCKET_SIZE": "1048576",
            "BAGUA_DEFAULT_CHANNELS": "4",
            "BAGUA_AUTOTUNE_ALLOW": "bfloat16, FP16,",
            "BAGUA_AUTOTUNE_KNOBS": "-channels",
            "BAGUA_AUTOTUNE_RESULT": "results.jsonl",
            "BAGUA_CONFIGURATION": " tuned.json",
        }
    ) == Environment(
        autotune=True,
        url="http://tuner:8123",
        token="secret",
        job="digits",
        max_samples=7,
        max_minutes=1.5,
        memory_share=0.75,
        fresh=True,
        trial_seconds=0.5,
        warmup_seconds=0.0,
        remaining_steps=500,
        max_rounds=3,
        server_wait_seconds=12.5,
        service_port=8123,
        default_bucket_bytes=1048576,
        default_channels=4,
        allowed=frozenset({"bf16", "fp16"}),
        knobs={"channels": Choice()},
        result="results.jsonl",
        configuration="tuned.json",
    )


def test_what_may_be_allowed_is_said() -> None:
    with pytest.raises(ValueError, match=r"ALLOW lists 'int4'; it may list bfloat16, .*bytegrad"):
        Environment.read({"BAGUA_AUTOTUNE_ALLOW": "bfloat16,int4"})


def test_algorithms_may_be_allowed() -> None:
    read = Environment.read({"BAGUA_AUTOTUNE_ALLOW": "ByteGrad,async,bf16"})
    assert read.allowed == {"bytegrad", "async", "bf16"}


def test_baguas_port_of_minus_one_is_any_port() -> None:
    assert Environment.read({"BAGUA_SERVICE_PORT": "-1"}).service_port == 0


@pytest.mark.parametrize(
    ("words", "is_on"),
    [
        (["1", "2", "01", "true", "True", "YES", " on "], True),
        (["0", "00", "false", "FALSE", "No", " off "], False),
    ],
)
def test_autotune_is_on_from_one_upwards_and_where_a_word_says_so(
    words: list[str], is_on: bool
) -> None:
    assert [Environment.read({"BAGUA_AUTOTUNE": it}).autotune for it in words] == [is_on] * len(
        words
    )


@pytest.mark.parametrize("autotune", ["maybe", "-1", "1.5"])
def test_what_autotune_may_be_is_said_and_the_training_goes_on(
    autotune: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Environment.read({"BAGUA_AUTOTUNE": autotune, "RANK": "3"}).autotune is False
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == (
        f"rank 3: BAGUA_AUTOTUNE is {autotune!r}, so the training is not tuned; it may be 1 (or "
        "true, yes, on), or 0 (or false, no, off)"
    )


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:9", "http://127.0.0.1:9"),
        ("tuner:8123/autotune", "http://tuner:8123/autotune"),
        ("https://tuner", "https://tuner"),
        (" ", None),
    ],
)
def test_an_address_without_a_scheme_is_http(text: str, url: str | None) -> None:
    assert Environment.read({"BAGUA_AUTOTUNE_URL": text}).url == url


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BAGUA_AUTOTUNE_MAX_SAMPLES", "0"),
        ("BAGUA_AUTOTUNE_MAX_SAMPLES", "501"),
        ("BAGUA_AUTOTUNE_MAX_SAMPLES", "7.5"),
        ("BAGUA_AUTOTUNE_MEMORY", "1.1"),
        ("BAGUA_AUTOTUNE_MEMORY", "90 %"),
        ("BAGUA_AUTOTUNE_MAX_MINUTES", "0"),
        ("BAGUA_AUTOTUNE_MAX_ROUNDS", "1001"),
        ("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", "nan"),
        ("BAGUA_AUTOTUNE_WARMUP_TIME_S", "inf"),
        ("BAGUA_AUTOTUNE_REMAINING_STEPS", "1000000001"),
        ("BAGUA_DEFAULT_BUCKET_SIZE", "25MiB"),
        ("BAGUA_DEFAULT_CHANNELS", "3"),
        ("BAGUA_SERVICE_PORT", "-2"),
    ],
)
def test_a_wrong_value_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* not '{text}'"):
        Environment.read({name: text})


def test_a_training_with_a_wrong_value_ends_with_the_sentence_alone() -> None:
    """A traceback on each rank buried it."""
    code = "from bagua_client.environment import Environment; Environment.read()"
    variables = {**os.environ, "BAGUA_AUTOTUNE_KNOBS": "="}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("bagua_client: ")
    assert "BAGUA_AUTOTUNE_KNOBS" in sentence


@pytest.mark.parametrize(
    ("variables", "sentences"),
    [
        ({"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": "tuner", "BAGUA_REPORT_METRICS": "1"}, []),
        ({"BAGUA_AUTOTUNE_URL": "", "BAGUA_AUTOTUNE_TOKEN": "t", "BAGUA_OF_A_SITE": "1"}, []),
        (
            {"BAGUA_AUTOTUNE_MAX_SAMPLES": "9", "BAGUA_AUTOTUNE_JOB": "digits"},
            [f"{IN_VAIN} BAGUA_AUTOTUNE_JOB, BAGUA_AUTOTUNE_MAX_SAMPLES"],
        ),
        (
            {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_MAX_SAMPLE": "9", "BAGUA_AUTOTUNE_XYZZY": "1"},
            [
                "BAGUA_AUTOTUNE_MAX_SAMPLE has no effect: there is no such variable; perhaps "
                "BAGUA_AUTOTUNE_MAX_SAMPLES is meant",
                "BAGUA_AUTOTUNE_XYZZY has no effect: there is no such variable",
            ],
        ),
    ],
)
def test_what_is_set_in_vain_is_said_once_by_rank_0(
    variables: dict[str, str],
    sentences: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(environment, "_warned", set())
    for name in [name for name in os.environ if name.startswith("BAGUA_")]:
        monkeypatch.delenv(name)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    for rank in "100":
        monkeypatch.setenv("RANK", rank)
        Environment.read()
        assert caplog.messages == (sentences if rank == "0" else [])


def test_every_variable_of_the_sources_is_known_and_no_other() -> None:
    """Those of the folders that are installed; what begins with another letter is click's."""
    root = Path(bagua_client.__file__).parents[2]
    texts = [
        path.read_text()
        for side in ("client", "autotune")
        for path in (root / side).rglob("*.py")
        if path.name != "environment.py"
    ]
    texts.append(inspect.getsource(Environment._read))
    found = set(re.findall(r"(?<!\w)BAGUA_\w*[A-Z]\b", "\n".join(texts)))
    assert found | {"BAGUA_REPORT_METRICS"} == environment.KNOWN
