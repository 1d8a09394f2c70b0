"""Health, readiness and metrics, for whoever runs the service."""

from __future__ import annotations

import logging

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.api.errors import failure
from bagua_autotune.metrics import Metrics
from bagua_autotune.store import Store
from bagua_autotune.store.errors import trouble

logger = logging.getLogger(__name__)


def blueprint(store: Store, metrics: Metrics) -> Blueprint:
    """Routes that need no token."""
    health = Blueprint("health", __name__)

    @health.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @health.get("/readyz")
    def readyz() -> Response | dict[str, str]:
        try:
            store.check()
        except SQLAlchemyError as error:
            metrics.service.count_store_error(error)
            logger.error("not ready: the store failed: %s", error)
            return failure(503, trouble(error))
        return {"status": "ok"}

    @health.get("/metrics")
    def exposition() -> Response:
        return Response(metrics.exposition(), content_type=CONTENT_TYPE_LATEST)

    return health
