"""What TensorBoard, Weights & Biases and MLflow show of a tuning: the real libraries, where they
are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bagua_client import Configuration, Tuning, callbacks

DEFAULT = Configuration(first_bucket_bytes=2**20)
RESULT = Tuning(
    state="finished",
    configuration=Configuration(4 * 2**20, "leaders"),
    default=DEFAULT,
    rank=0,
    best=Configuration(4 * 2**20, "leaders"),
    speedup=1.31,
    low=1.24,
    high=1.38,
    trials=9,
    steps=140,
    seconds=41.0,
    cost_steps=3.1,
    cost_seconds=0.6,
    payback_steps=14,
    summary="bucket 4 MiB, hierarchical: 1.31x (1.24 to 1.38) over the 25 MiB default",
    at_step=140,
    job="digits",
    page="http://127.0.0.1:1/jobs/x#token=secret",
)
KEPT = replace(
    RESULT, configuration=DEFAULT, best=DEFAULT, speedup=1.0, payback_steps=None, round=1
)
FAILED = Tuning(state="failed", reason="no service", configuration=DEFAULT, default=DEFAULT, rank=0)


@pytest.mark.slow
def test_no_library_is_imported_before_it_is_used() -> None:
    script = (
        "import sys, bagua_client\n"
        "bagua_client.on_tuned(bagua_client.callbacks.TensorBoard(None))\n"
        "print([n for n in ('tensorboard', 'wandb', 'mlflow', 'bagua_client.agent')"
        " if n in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


@pytest.mark.parametrize(
    ("make", "library", "package"),
    [(callbacks.WandB, "wandb", "wandb"), (callbacks.MLflow, "mlflow", "mlflow-skinny")],
)
def test_a_missing_library_is_named_where_the_callback_is_made(
    monkeypatch: pytest.MonkeyPatch, make: Any, library: str, package: str
) -> None:
    monkeypatch.setattr(callbacks, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=f"{library} is not installed; pip install {package}"):
        make()


def test_other_ranks_write_nothing() -> None:
    other = replace(RESULT, rank=1)
    callbacks.TensorBoard(None)(other)
    callbacks.WandB(run=object())(other)


STORED = {
    "name": "train.py", "state": "finished", "round": 0,
    "result": {
        "configuration": {"--ddp-bucket-size": 4194304, "ds.json:zero.overlap": "true"},
        "speedup": 1.31, "low": 1.24, "high": 1.38, "trials": 14, "steps": 14, "seconds": 240.0,
        "cost_steps": 900.0, "cost_seconds": 240.0, "payback_steps": None,
        "summary": "1.31x (1.24 to 1.38) over your settings",
    },
}  # fmt: skip


def test_a_stored_search_is_in_tensorboard_as_a_tuning_is(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        callbacks.TensorBoard(writer)(callbacks.Stored(STORED))
        found = EventAccumulator(str(tmp_path)).Reload()
    assert found.Scalars("bagua/speedup")[-1].value == pytest.approx(1.31)
    assert "bagua/payback_steps" not in found.Tags()["scalars"]
    (text,) = found.Tensors("bagua/result/text_summary")
    assert '"--ddp-bucket-size": 4194304' in text.tensor_proto.string_val[0].decode()


def test_a_job_without_a_result_is_refused() -> None:
    with pytest.raises(ValueError, match=r"job 'train\.py' has no result"):
        callbacks.Stored({**STORED, "state": "ended", "result": None})


def test_tensorboard_shows_figures_and_the_result(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        callback = callbacks.TensorBoard(writer)
        callback(RESULT)
        callback(FAILED)
        found = EventAccumulator(str(tmp_path)).Reload()  # it is flushed
    scalars = {name: found.Scalars(name)[-1] for name in found.Tags()["scalars"]}
    assert scalars["bagua/speedup"].value == pytest.approx(1.31)
    assert {name: each.step for name, each in scalars.items()} == dict.fromkeys(
        [f"bagua/{name}" for name in callbacks.FIGURES], 140
    )
    first, second = found.Tensors("bagua/result/text_summary")
    text = first.tensor_proto.string_val[0].decode()
    assert text.startswith(RESULT.summary)
    assert '"hierarchical": "leaders"' in text
    assert "secret" not in text
    assert second.tensor_proto.string_val[0].decode().startswith("failed: no service")


def test_wandb_has_the_configuration_in_its_config_and_figures_in_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = callbacks.WandB()
    with pytest.raises(RuntimeError, match=r"call wandb.init\(\) before"):
        callback(RESULT)
    run = wandb.init(mode="offline", dir=str(tmp_path), project="p")
    try:
        callback(RESULT)
        assert run.config["bagua"]["hierarchical"] == "leaders"
        assert run.summary["bagua/speedup"] == 1.31
        assert run.summary["bagua/result"] == RESULT.summary
        callbacks.WandB(run)(KEPT)  # another round
        assert run.config["bagua"]["hierarchical"] == "off"
        assert run.summary["bagua/speedup"] == 1.0
        callbacks.WandB(run)(callbacks.Stored(STORED))
        assert run.config["bagua"]["--ddp-bucket-size"] == 4194304
        assert run.summary["bagua/result"].startswith("1.31x")
        assert run.step == 0  # the training's own history is left alone
        assert "secret" not in str(dict(run.config)) + str(dict(run.summary))
    finally:
        run.finish()


def test_mlflow_has_figures_as_metrics_and_the_configuration_as_tags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "new").as_uri())
    callback = callbacks.MLflow()
    with pytest.raises(RuntimeError, match=r"call mlflow.start_run\(\) before"):
        callback(RESULT)
    with mlflow.start_run() as stored:
        callback(callbacks.Stored(STORED))
    data = mlflow.get_run(stored.info.run_id).data
    assert data.metrics["bagua.trials"] == 14
    assert "bagua.payback_steps" not in data.metrics
    assert data.tags["bagua.ds.json:zero.overlap"] == "true"
    with mlflow.start_run() as run:
        callback(RESULT)
        callback(KEPT)
    callbacks.MLflow(run_id=run.info.run_id)(FAILED)
    data = mlflow.get_run(run.info.run_id).data
    assert data.metrics["bagua.speedup"] == 1.0
    assert data.metrics["bagua.low"] == 1.24
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "bagua.speedup")
    assert [(metric.step, metric.value) for metric in history] == [(0, 1.31), (1, 1.0)]
    assert data.tags["bagua.hierarchical"] == "off"
    assert data.tags["bagua.result"] == "failed: no service"
    assert "secret" not in json.dumps(data.tags)
