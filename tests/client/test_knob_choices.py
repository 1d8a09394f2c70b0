"""What BAGUA_AUTOTUNE_KNOBS may say, and what is left to be tried."""

from __future__ import annotations

import logging
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.environment import Environment
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.knob_choices import Choice, read_choices
from bagua_wire.knobs import KNOBS
from tests.client.agent.scripted_service import ScriptedService
from tests.client.listening import logged
from tests.ranks import RankPool

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
    with logged(logging.WARNING) as lines:
        return *_registered_by(url, said), lines


def _registered_by(url: str, said: str) -> tuple[Configuration, list[int], float]:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(4)]
    variables = {
        "BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url, "BAGUA_AUTOTUNE_KNOBS": said,
        "BAGUA_AUTOTUNE_ALLOW": "bf16",
    }  # fmt: skip
    with mock.patch.dict(os.environ, variables):
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
    buckets: list[int] = []
    for step in range(400):
        model.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        buckets = buckets or [len(b) for b in tunable_of(model).layout.partition] * (step == 2)
        if model.tuning.trials:
            break
    assert layers[0].weight.grad is not None
    return model.tuning.default, buckets, float(layers[0].weight.grad.sum())


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
