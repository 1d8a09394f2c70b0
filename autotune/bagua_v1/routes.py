"""``/api/v1``: the protocol that unmodified Bagua 0.9 workers speak.

Routes, fields, types and statuses are those of the release 0.9.2: ``autotune_service.py`` in
``bagua/service``, ``bagua/bagua_define.py`` and ``rust/bagua-core/bagua-opentelemetry`` (spans).
Bad input, for which Bagua answered 500, gets an error document with a 4xx status. Fields that are
not named here are ignored, as Bagua's own service ignores them.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import threading
from pathlib import Path
from typing import Annotated, Literal

from flask import Blueprint, Flask, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from bagua_autotune.api.bodies import BOUNDS, LARGEST_BODY_BYTES, MARKS_OF_ALL, Bounds, parse
from bagua_autotune.api.errors import failure
from bagua_autotune.measuring.against_default import OBJECTIVES
from bagua_autotune.model.job import MOST_RANKS, MOST_TENSORS, Job, JobName, Trial
from bagua_autotune.model.received import Label
from bagua_autotune.settings import Settings
from bagua_autotune.store.engine.location import FILE_MODE
from bagua_autotune.tuning.background import TunerListener
from bagua_autotune.tuning.tuner import Tuner
from bagua_v1.directory import NotRegistered
from bagua_v1.hyperparameters import tensor, to_configuration
from bagua_v1.tuning import BaguaTuning, RankOutsideWorld

logger = logging.getLogger(__name__)


class CsvLog(TunerListener):
    """One line for each measured trial, in ``bagua_autotune_<job id>.csv`` in a folder;
    ``BAGUA_IS_OUTPUT_AUTOTUNE_LOG`` switches it on, as in Bagua."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def on_measured(self, job: Job, trial: Trial) -> None:
        if trial.estimate is None:
            return
        path = self._folder / f"bagua_autotune_{job.id}.csv"
        row = {
            "trial": trial.index,
            "purpose": trial.purpose,
            **trial.configuration,
            "steps": trial.estimate.count,
            "outliers": trial.estimate.outliers,
            "cost": trial.estimate.center,
            "seconds": OBJECTIVES[job.protocol].seconds(trial.estimate.center),
        }
        try:
            with self._lock, open(path, "a", newline="", opener=_private) as file:
                writer = csv.DictWriter(file, fieldnames=row, lineterminator="\n")
                if file.tell() == 0:
                    logger.info("job %s: its trials are written to %s", job.id, path)
                    writer.writeheader()
                writer.writerow(row)
        except OSError as error:  # a log that cannot be written must not stop the tuning
            lost = "job %s: trial %d is not in the CSV log: %s"
            logger.warning(lost, job.id, trial.index, error)


def _private(path: str, flags: int) -> int:
    """Open it; if it is new, for this user alone."""
    return os.open(path, flags, FILE_MODE)


# An observation has a place for every rank up to the highest.
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS)]
Iteration = Annotated[int, Field(ge=0, lt=2**62)]
# Bagua's Rust exporter sends u128.
Unsigned128 = Annotated[int, Field(ge=0, lt=2**128)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)


class TensorDeclaration(_Message):
    """One tensor; the worker's ``to_bagua_datatype`` knows these four types."""

    name: Label
    num_elements: int = Field(ge=0, le=2**50)
    dtype: Literal["f16", "f32", "i64", "u8"]


class RegisterTensors(_Message):
    model_name: JobName
    tensor_list: list[TensorDeclaration] = Field(
        min_length=1, max_length=MOST_TENSORS, fail_fast=True
    )
    whether_to_bucket: bool = True

    @model_validator(mode="after")
    def _names_differ(self) -> RegisterTensors:
        if len({tensor.name for tensor in self.tensor_list}) != len(self.tensor_list):
            raise ValueError("tensor_list: a name occurs twice")
        return self


class Hyperparameters(_Message):
    """The part of a worker's ``BaguaHyperparameter`` that names the configuration it ran."""

    bucket_size: int = Field(default=0, ge=0, le=2**53)
    is_hierarchical_reduce: bool = False


class AskHyperparameters(_Message):
    model_name: JobName
    rank: Rank
    train_iter: Iteration


class ReportMetrics(AskHyperparameters):
    """``speed``: any finite number, higher is better."""

    hyperparameters: Hyperparameters
    speed: float


class Span(_Message):
    """``start_time`` and ``end_time`` in milliseconds since the epoch."""

    trace_id: Unsigned128
    action: Annotated[str, Field(max_length=512)]
    tensor_name: Label
    start_time: Unsigned128
    end_time: Unsigned128


class ReportTensorExecutionOrder(_Message):
    spans: list[Span] = Field(max_length=MOST_TENSORS, fail_fast=True)


# Bagua's hyperparameters name the tensors in their buckets.
for _route, _containers in (
    ("register_tensors", MOST_TENSORS),
    ("report_metrics", 2 * MOST_TENSORS),
    ("report_tensor_execution_order", MOST_TENSORS),
):
    BOUNDS[f"/api/v1/{_route}"] = Bounds(LARGEST_BODY_BYTES, _containers + 10, MARKS_OF_ALL)


def install(app: Flask, tuner: Tuner, settings: Settings) -> None:
    """Add the routes, and the log that Bagua's variable asks for."""
    if settings.csv_log:
        tuner.listeners.append(CsvLog(Path.cwd()))
    tuning = BaguaTuning(tuner, settings.limits, settings.world_size, settings.default_bucket_bytes)
    api = Blueprint("v1", __name__, url_prefix="/api/v1")

    @api.post("/register_tensors")
    def register_tensors() -> Response:
        message = parse(RegisterTensors)
        tensors = [tensor(t.name, t.num_elements, t.dtype) for t in message.tensor_list]
        wire = tuning.register(message.model_name, tensors, message.whether_to_bucket)
        return _answer(f'{{"recommended_hyperparameters": {wire}}}')

    @api.post("/report_metrics")
    def report_metrics() -> Response:
        message = parse(ReportMetrics)
        worker = message.hyperparameters
        ran = to_configuration(worker.bucket_size, worker.is_hierarchical_reduce)
        tuning.report(message.model_name, message.rank, message.train_iter, ran, message.speed)
        return _answer("{}")

    @api.post("/ask_hyperparameters")
    def ask_hyperparameters() -> Response:
        message = parse(AskHyperparameters)
        wire, is_final = tuning.ask(message.model_name, message.rank, message.train_iter)
        completed = json.dumps(is_final)
        return _answer(
            f'{{"recommended_hyperparameters": {wire}, "is_autotune_completed": {completed}}}'
        )

    @api.post("/report_tensor_execution_order")
    def report_tensor_execution_order() -> Response:
        spans = parse(ReportTensorExecutionOrder).spans
        tuning.order(span.tensor_name for span in sorted(spans, key=lambda s: s.start_time))
        return _answer("{}")

    @api.get("/health_check")
    def health_check() -> Response:
        return _answer('{"status": "ok"}')

    @api.errorhandler(NotRegistered)
    def _not_registered(error: NotRegistered) -> Response:
        # Bagua's own status for this; its workers know no other.
        return failure(405, f"No model {str(error)!r} is registered; call register_tensors first.")

    @api.errorhandler(RankOutsideWorld)
    def _rank_outside_world(error: RankOutsideWorld) -> Response:
        return failure(422, f"rank: {error} that the service was started with.")

    app.register_blueprint(api)


def _answer(body: str) -> Response:
    return Response(body, content_type="application/json")
