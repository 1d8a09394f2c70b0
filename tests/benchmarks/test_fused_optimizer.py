"""The benchmark of fused optimizers measures what it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.fused_optimizer import bert, main


def test_its_shapes_are_bert_s() -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.BertModel(transformers.BertConfig())
    assert sorted(bert(768)) == sorted(tuple(p.shape) for p in model.parameters())


def test_it_prints_a_row_for_each_pair(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    main(["--device", "cpu", "--models", "small", "--pairs", "1"])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 7
    assert all(row.endswith(("met", "MISSED")) for row in rows[1:])
