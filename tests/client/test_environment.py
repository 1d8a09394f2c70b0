"""Reading the environment variables."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import bagua_client
from bagua_client import Configuration, DistributedDataParallel, environment
from bagua_client.environment import Choice, Environment, read_choices
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_wire.knobs import KNOBS
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.client.listening import logged
from tests.ranks import RankPool

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


MIB = 2**20


def test_what_it_says_is_read() -> None:
    text = "-channels, hierarchical=off/Leaders,bucket_bytes=1MiB..64mib,first_bucket_bytes=0/64KiB"
    assert read_choices(text) == {
        "channels": Choice(),
        "hierarchical": Choice(("off", "leaders")),
        "bucket_bytes": Choice((MIB, 64 * MIB)),
        "first_bucket_bytes": Choice((0, 65536)),
    }
    assert read_choices("bucket_bytes=4194304,channels=4") == {
        "bucket_bytes": Choice((4 * MIB,)),
        "channels": Choice((4,)),
    }
    assert read_choices(" , ") == {}
    assert Environment.read({"BAGUA_AUTOTUNE_KNOBS": "-buckets"}).knobs == {"buckets": Choice()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-channel", r"names 'channel', which is not a knob; the knobs are bucket_bytes, hier"),
        ("channels", r"says 'channels'; it may say -channels, .* or channels= and .* 1/2/4/8/16"),
        ("channels=3", r"channels=3.* one or some of 1/2/4/8/16"),
        (
            "-channels=2",
            r"says '-channels=2'; it may say -channels, which leaves it at its default",
        ),
        ("hierarchical=tree", "one or some of off/leaders/shards"),
        ("bucket_bytes=big", r"a size such as 4MiB, or a range such as 1MiB\.\.64MiB"),
        ("bucket_bytes=0", "a size such as 4MiB"),
        ("bucket_bytes=1MiB..", "a range such as"),
        ("first_bucket_bytes=-1", "sizes such as 0/1MiB/4MiB"),
        ("buckets=3/4", "it may say -buckets, which leaves it at its default$"),
        ("-channels,channels=2", "names channels twice"),
    ],
)
def test_what_may_be_said_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^BAGUA_AUTOTUNE_KNOBS .*{message}"):
        read_choices(text)


def test_every_knob_can_be_switched_off() -> None:
    every = [f"-{knob}" for knob in Configuration().to_json()]
    assert list(read_choices(",".join(every))) == [knob[1:] for knob in every]


def _register(url: str, said: str) -> tuple[Configuration, list[int], float, list[str]]:
    """The default, the buckets of the third step, a gradient, and what was warned of."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
    with logged(logging.WARNING) as lines:
        with tuned_at(url, KNOBS=said, ALLOW="bf16"):
            model = DistributedDataParallel(torch.nn.Sequential(*layers))
        buckets: list[int] = []
        for step in range(400):
            model.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            buckets = buckets or [len(b) for b in tunable_of(model).layout.partition] * (step == 2)
            if model.tuning.trials:
                break
    assert layers[0].weight.grad is not None
    return model.tuning.default, buckets, float(layers[0].weight.grad.sum()), lines


def _registered(ranks: RankPool, said: str) -> tuple[Any, Any]:
    with ScriptedService([[{"bucket_bytes": 10}, {"bucket_bytes": 20}]]) as service:
        first, *others = ranks.run(_register, service.url, said)
        (body,) = service.bodies("PUT")
    assert [other[:3] for other in others] == [first[:3]] * len(others)
    assert not any(lines for *_, lines in others)
    return body, first


def test_what_is_switched_off_or_pinned_is_not_tried(four_ranks: RankPool) -> None:
    plain, (*_, gradient, lines) = _registered(four_ranks, "")
    # Nothing is recomputed here.
    replicated = {n for n, knob in KNOBS.items() if "replicated" in knob.models}
    replicated.remove("recomputed_blocks")
    assert set(plain["knobs"]) == replicated - {"algorithm"}
    assert lines == []
    said = "-buckets,-wire_precision,hierarchical=shards,channels=1/4,bucket_bytes=32KiB,"
    body, (default, buckets, pinned_gradient, lines) = _registered(
        four_ranks, said + "first_bucket_bytes=0,last_bucket_bytes=0/20KiB"
    )
    knobs = {name: domain.get("values") for name, domain in body["knobs"].items()}
    assert knobs == {
        "bucket_bytes": None,
        "hierarchical": ["shards"],
        "channels": [1, 4],
        "first_bucket_bytes": [0],
        "last_bucket_bytes": [0, 20480],
        "wire_precision": ["as_is"],
    }
    assert body["knobs"]["bucket_bytes"] == {"type": "log_integer", "low": 32768, "high": 32768}
    # The default has what is pinned: it is what everything is compared with.
    assert default == Configuration(32768, "shards")
    assert {k: default.to_json()[k] for k in knobs} == body["default_configuration"]
    assert buckets == [2, 2]  # of 16 KiB each, from the first steps on
    assert pinned_gradient == pytest.approx(gradient, rel=1e-5)
    assert lines == []


def test_what_cannot_be_had_is_said_and_the_default_is_tried_too(two_ranks: RankPool) -> None:
    body, (default, _, _, lines) = _registered(
        two_ranks, "hierarchical=leaders,channels=2/4,bucket_bytes=1MiB..4MiB"
    )
    assert default == Configuration(first_bucket_bytes=MIB)
    assert body["knobs"]["hierarchical"]["values"] == ["off"]
    assert body["knobs"]["channels"]["values"] == [1, 2, 4]
    assert (body["knobs"]["bucket_bytes"]["low"], default.bucket_bytes) == (MIB, 25 * MIB)
    assert body["knobs"]["bucket_bytes"]["high"] == 25 * MIB
    assert lines == [
        "BAGUA_AUTOTUNE_KNOBS: hierarchical stays at its default, as leaders is not possible here: "
        "this job can have off",
        "BAGUA_AUTOTUNE_KNOBS: the default bucket_bytes, 26214400, is tried too",
        "BAGUA_AUTOTUNE_KNOBS: the default channels, 1, is tried too",
    ]


def _pinned_on(rank: int) -> tuple[str, list[str]]:
    said = "channels=4,hierarchical=off/leaders" if dist.get_rank() == rank else "-buckets"
    tuned = mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_KNOBS": said})
    with tuned, logged(logging.WARNING) as lines:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
    return str(model.tuning), lines


def test_ranks_that_pin_different_things_are_not_tuned(two_ranks: RankPool) -> None:
    """They would wait for one another in making process groups."""
    results = two_ranks.run(_pinned_on, 1)
    reason = (
        "BAGUA_AUTOTUNE_KNOBS pins other values on rank 1 than on the other ranks; set the same "
        "value on all ranks"
    )
    assert [words for words, _ in results] == [f"off: {reason}"] * 2
    assert [line for _, lines in results for line in lines] == [f"autotune is off: {reason}"]
