"""BAGUA_CONFIGURATION: what a file says is what all ranks train with, or none of them does."""

from __future__ import annotations

import copy
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Stock

import bagua_client
from bagua_client import Configuration, DistributedDataParallel
from bagua_client.communication import agreement
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.layout import describe
from bagua_client.torch_private import reducer as torchs
from bagua_wire.configuration import described
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.client.listening import logged
from tests.ranks import RankPool

DEFAULT = Configuration(first_bucket_bytes=2**20)
LISTS = pytest.mark.skipif(
    not torchs.HAS_BUCKET_CAPS, reason="torch before 2.11 cannot set the size of each bucket"
)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(10)]
    for layer in layers:
        torch.nn.init.orthogonal_(layer.weight)  # so that gradients are neither tiny nor large
    return torch.nn.Sequential(*layers)


def _document(configuration: Configuration, **more: Any) -> dict[str, Any]:
    tensors = describe([(name, p) for name, p in _model().named_parameters()])
    ready = tensors[::-1]  # the last layer's gradients come first
    return {"format": 1, "job": "before", "tensors": described(ready),
            "configuration": configuration.to_json(), **more}  # fmt: skip


def _train(path: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Eight steps beside stock DDP. For each: what is in force, and the tensors by bucket."""
    with logged() as lines:
        found = _trained_beside_stock(path, options)
    return {**found, "lines": [line for line in lines if line.startswith("BAGUA_CONFIGURATION")]}


def _trained_beside_stock(path: str | None, options: dict[str, Any]) -> dict[str, Any]:
    plain = _model()
    twin = Stock(copy.deepcopy(plain))
    with mock.patch.dict(os.environ, {} if path is None else {"BAGUA_CONFIGURATION": path}):
        model: Any = DistributedDataParallel(plain, **options)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]
    seen = []
    for step in range(8):
        torch.manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 16)
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            each(inputs).square().mean().backward()
            optimizer.step()
        partition = tunable_of(model).layout.partition
        seen.append((model.configuration, [len(bucket) for bucket in partition]))
    pairs = zip(plain.parameters(), twin.module.parameters(), strict=True)
    return {
        "seen": seen,
        "difference": max((a - b).abs().max().item() for a, b in pairs),
        "tuning": str(model.tuning),
        "attached": tunable_of(model).is_attached,
    }


def _trained(ranks: RankPool, path: Path, document: Any, **options: Any) -> list[dict[str, Any]]:
    path.write_text(json.dumps(document))
    first, *others = ranks.run(_train, str(path), options)
    for other in others:
        assert other["seen"] == first["seen"]
    for each in (first, *others):
        assert each["difference"] < 2e-6
        assert not each["attached"]
        assert each["tuning"] == "off: BAGUA_AUTOTUNE=1 is not set"
    return [first, *others]


def test_all_ranks_train_with_it_from_the_first_step_on(
    four_ranks: RankPool, tmp_path: Path
) -> None:
    asked = Configuration(3000, "leaders", channels=2)
    first, *others = _trained(four_ranks, tmp_path / "tuned.json", _document(asked))
    assert first["seen"] == [(asked, [3, 3, 3, 1])] * 8
    words = "bucket 2.93 KiB, hierarchical, 2 channels (tuned.json, of job before)"
    assert first["lines"] == [f"BAGUA_CONFIGURATION: {words}"]
    assert not any(other["lines"] for other in others)


@LISTS
def test_explicit_buckets_come_when_their_order_is_known(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    asked = Configuration(2000, channels=2, buckets=(1, 2, 7))
    first, _ = _trained(two_ranks, tmp_path / "a.json", _document(asked))
    assert first["seen"][0] == (replace(asked, buckets=()), [2] * 5)
    assert first["seen"][-4:] == [(asked, [1, 2, 7])] * 4
    assert len(first["lines"]) == 1
    # Other tensors than when it was found: said, and done.
    document = _document(asked)
    document["tensors"]["order_digest"] = "another"
    first, _ = _trained(two_ranks, tmp_path / "a.json", document)
    assert first["seen"][-1] == (asked, [1, 2, 7])
    assert "in another order than when a.json was made" in first["lines"][-1]


def _set_by_hand(path: str) -> Configuration:
    with mock.patch.dict(os.environ, {"BAGUA_CONFIGURATION": path}):
        model = DistributedDataParallel(_model())
    for step in range(8):
        if step == 1:
            assert model.reconfigure(Configuration(5000))
        model(torch.ones(4, 16)).sum().backward()
    return model.configuration


@LISTS
def test_what_is_set_by_hand_meanwhile_stays(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(_document(Configuration(2000, buckets=(1, 2, 7)))))
    assert two_ranks.run(_set_by_hand, str(path)) == [Configuration(5000)] * 2


@LISTS
def test_what_changes_numbers_and_what_is_not_as_it_was_is_said(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    then = {"ranks_per_node": [2, 2], "software": {"backend": "nccl", "torch": "9"}}
    for asked, words in (
        (Configuration(3000, wire_precision="bf16", buckets=(5, 5)), "bf16 on the wire"),
        (Configuration(3000, algorithm="powersgd"), "algorithm powersgd"),
    ):
        path.write_text(json.dumps(_document(asked, **then)))
        found = two_ranks.run(_train, str(path), {})[0]
        assert found["seen"][-1][0] == asked
        assert 1e-5 < found["difference"] < 0.1
        assert f"{words} (changes the numbers) (a.json, of job before)" in found["lines"][0]
        assert found["lines"][1].endswith(
            "may not be the fastest here: ranks per node [2, 2] then, [2] now; backend nccl then, "
            "gloo now"
        )


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        {"format": 1, "configuration": {}, "tensors": {"count": 12}},
        {},
        "a.json is for a model of 12 tensors, this one has 10",
    ),
    (
        {"configuration": {}, "tensors": {"count": 10, "digest": "x"}},
        {},
        "a.json is for another model: its tensors have other names or sizes",
    ),
    ({"configuration": {"buckets": [3, 3]}}, {}, "the buckets of a.json hold 6 tensors"),
    (
        {"configuration": {"hierarchical": "leaders"}},
        {},
        "hierarchical leaders is not possible here, only off (ranks per node: 2)",
    ),
    ({"configuration": {"channels": 3}}, {}, "on rank 0 a.json: channels must be one of 1, 2"),
    ({"configuration": {"algorithm": "magic"}}, {}, "magic"),
    ({"format": 2, "configuration": {}}, {}, "a.json is of a later release"),
    ([1], {}, "a.json has no configuration; 'bagua-autotune export JOB --configuration' writes"),
    (
        {"configuration": {"last_bucket_bytes": 1000}},
        {"find_unused_parameters": True},
        "with find_unused_parameters=True torch cuts in the order in which the model lists",
    ),
]


@LISTS
def test_what_does_not_fit_is_refused_in_one_line_and_the_default_trains(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    for document, options, reason in REFUSED:
        found = _trained(two_ranks, tmp_path / "a.json", document, **options)
        assert {str(configuration) for configuration, _ in found[0]["seen"]} == {str(DEFAULT)}
        (line,) = [line for each in found for line in each["lines"]]
        assert line.startswith(
            "BAGUA_CONFIGURATION is not used; training begins with the default: "
        ), line
        assert reason in line


def _on_rank(rank: int, this: str, others: str | None) -> tuple[Any, list[str]]:
    agreement.ANSWER_SECONDS = 2.0
    found = _train(this if dist.get_rank() == rank else others, {})
    return found["seen"][-1][0], found["lines"]


def test_a_file_that_differs_or_is_missing_on_a_rank_is_used_by_none(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(_document(Configuration(3000))))
    other.write_text(json.dumps(_document(Configuration(5000))))
    absent = tmp_path / "absent.json"
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for this, others, reason in (
        (str(other), str(one), "the file on rank 1 differs from that on the other ranks"),
        (str(absent), str(one), f"on rank 1 {absent} cannot be read: No such file or directory"),
        (str(broken), str(one), "on rank 1 broken.json is not JSON: "),
        # The variable itself.
        (str(one), None, "not all ranks have it set"),
    ):
        results = two_ranks.run(_on_rank, 1, this, others)
        assert [configuration for configuration, _ in results] == [DEFAULT, DEFAULT]
        (line,) = [line for _, lines in results for line in lines]
        assert reason in line


def _tuned(url: str, path: str) -> tuple[list[str], Configuration]:
    with logged(logging.WARNING) as lines:
        with tuned_at(url), mock.patch.dict(os.environ, {"BAGUA_CONFIGURATION": path}):
            model = bagua_client.tune(Stock(_model()))
        assert isinstance(model, DistributedDataParallel)
        before = model.configuration
        for _ in range(400):
            model(torch.ones(1, 16)).sum().backward()
            if model.tuning.state == "tuning":
                break
    return lines, before


@LISTS
def test_a_tuning_is_asked_to_begin_with_it(two_ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for asked, reason in (
        (Configuration(65536, channels=2, buckets=(4, 6)), ""),
        (Configuration(2**21, wire_precision="bf16"), "wire_precision bf16 is not among what is"),
    ):
        path.write_text(json.dumps(_document(asked)))
        with ScriptedService([[DEFAULT.to_json()]]) as service:
            results = two_ranks.run(_tuned, service.url, str(path))
            (body,) = service.bodies("PUT")
        assert [before for _, before in results] == [DEFAULT, DEFAULT]
        if reason:
            assert "begin_with" not in body
            assert reason in results[0][0][0]
        else:
            expected = {knob: asked.to_json()[knob] for knob in body["knobs"]}
            assert body["begin_with"] == expected
            assert results[0][0] == []
