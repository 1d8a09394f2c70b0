"""``/api/v1``: the protocol that unmodified Bagua 0.9 workers speak.

Routes, fields and statuses are those of ``bagua/service/autotune_service.py`` (release 0.9.2);
bad input, for which Bagua answered 500, gets an error document with a 4xx status.
"""

from __future__ import annotations

import json

from flask import Blueprint, Response

from bagua_autotune.api.bodies import parse
from bagua_autotune.api.errors import failure
from bagua_autotune.bagua import messages
from bagua_autotune.bagua.hyperparameters import tensor, to_configuration
from bagua_autotune.bagua.storage import NotRegistered
from bagua_autotune.bagua.tuning import BaguaTuning, RankOutsideWorld


def blueprint(tuning: BaguaTuning) -> Blueprint:
    """The routes; the tuning answers them."""
    api = Blueprint("v1", __name__, url_prefix="/api/v1")

    @api.post("/register_tensors")
    def register_tensors() -> Response:
        message = parse(messages.RegisterTensors)
        tensors = [tensor(t.name, t.num_elements, t.dtype) for t in message.tensor_list]
        wire = tuning.register(message.model_name, tensors, message.whether_to_bucket)
        return _answer(f'{{"recommended_hyperparameters": {wire}}}')

    @api.post("/report_metrics")
    def report_metrics() -> Response:
        message = parse(messages.ReportMetrics)
        worker = message.hyperparameters
        ran = to_configuration(worker.bucket_size, worker.is_hierarchical_reduce)
        tuning.report(message.model_name, message.rank, message.train_iter, ran, message.speed)
        return _answer("{}")

    @api.post("/ask_hyperparameters")
    def ask_hyperparameters() -> Response:
        message = parse(messages.AskHyperparameters)
        wire, is_final = tuning.ask(message.model_name, message.rank, message.train_iter)
        completed = json.dumps(is_final)
        return _answer(
            f'{{"recommended_hyperparameters": {wire}, "is_autotune_completed": {completed}}}'
        )

    @api.post("/report_tensor_execution_order")
    def report_tensor_execution_order() -> Response:
        spans = parse(messages.ReportTensorExecutionOrder).spans
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

    return api


def _answer(body: str) -> Response:
    return Response(body, content_type="application/json")
